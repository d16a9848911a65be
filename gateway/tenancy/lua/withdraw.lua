-- WITHDRAW: gives back what parts of a reservation hold that were never taken up. ARGV: id, part, … Returns how many.
local given = 0
for i = 2, #ARGV do
  if settle(ARGV[1], ARGV[i]) then given = given + 1 end
end
return given
