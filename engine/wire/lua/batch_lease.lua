-- BATCH_LEASE: takes, renews or gives back the lease on a batch. ARGV: whose it is to be, milliseconds (0: give it
-- back). Returns 1, or 0 where another one has it.
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
if ARGV[2] == '0' then
  redis.call('DEL', KEYS[1])
else
  redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
end
return 1
