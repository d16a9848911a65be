-- LEASE: takes (ARGV[3] = '1') or renews an engine's lease; ARGV[5] names its life, one process. Returns 1, or 0 when
-- the lease was taken away: by a reaper, or because the pool's card is gone (the store was away for long or lost its
-- data) and the engine must register again.
local engine, lease, take, card_ttl = ARGV[1], tonumber(ARGV[2]), ARGV[3] == '1', ARGV[4]
local held = take or redis.call('ZSCORE', pool .. 'engines', engine)
if not held or redis.call('PEXPIRE', pool .. 'card', card_ttl) == 0 then return 0 end
redis.call('PEXPIRE', pool .. 'tokenizer', card_ttl)
redis.call('ZADD', pool .. 'engines', now + lease, engine)
redis.call('PEXPIRE', pool .. 'engines', DAY)
if take then
  redis.call('HSET', pool .. 'lives', engine, ARGV[5])
  redis.call('HSET', pool .. 'rooms', engine, '') -- it says so with its claims
  redis.call('HSETNX', pool .. 'drain', 'at', 0)
end
for _, key in ipairs({'engine_stats', 'lives', 'rooms', 'drain'}) do redis.call('PEXPIRE', pool .. key, DAY) end
return 1
