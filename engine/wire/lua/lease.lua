-- LEASE: takes (ARGV[3] = '1') or renews an engine's lease. Returns 1, or 0 when it was taken away: by a reaper, or
-- because the pool's card is gone (the store was away for long or lost its data) and the engine must register again.
local engine, lease, card_ttl = ARGV[1], tonumber(ARGV[2]), ARGV[4]
local held = ARGV[3] == '1' or redis.call('ZSCORE', pool .. 'engines', engine)
if not held or redis.call('PEXPIRE', pool .. 'card', card_ttl) == 0 then return 0 end
redis.call('PEXPIRE', pool .. 'tokenizer', card_ttl)
redis.call('ZADD', pool .. 'engines', now + lease, engine)
redis.call('PEXPIRE', pool .. 'engines', DAY)
return 1
