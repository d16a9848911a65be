-- RECORD_DROP: takes away the records of one part with the ids ARGV[2...], or all of them. Returns how many there were.
local ids, dropped = {unpack(ARGV, 2)}, 0
sweep()
if #ids == 0 then ids = redis.call('ZRANGE', index, 0, -1) end
for _, id in ipairs(ids) do
  if redis.call('ZSCORE', index, id) then
    drop(name_of(id))
    dropped = dropped + 1
  end
end
return dropped
