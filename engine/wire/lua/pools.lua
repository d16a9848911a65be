-- POOLS: the register of models, a ZSET of model id -> time at which it is forgotten unless an engine renews it.
-- KEYS[1] is the register; ARGV: a model id to enter ('' for none), its time to live. Returns the ids. No prelude.
local clock = redis.call('TIME')
local now = tonumber(clock[1]) * 1000 + math.floor(tonumber(clock[2]) / 1000)
if ARGV[1] ~= '' then redis.call('ZADD', KEYS[1], now + tonumber(ARGV[2]), ARGV[1]) end
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
return redis.call('ZRANGE', KEYS[1], 0, -1)
