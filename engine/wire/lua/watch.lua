-- WATCH: what somebody must see to its end, a ZSET of name -> time at which whoever watches it is taken for dead.
-- KEYS[1] is that set. ARGV: milliseconds to hold for, names to take over at most, then the names that the caller
-- holds. Returns the names taken over. No prelude.
local clock = redis.call('TIME')
local now = tonumber(clock[1]) * 1000 + math.floor(tonumber(clock[2]) / 1000)
for i = 3, #ARGV do redis.call('ZADD', KEYS[1], now + ARGV[1], ARGV[i]) end
local taken = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, ARGV[2])
for _, name in ipairs(taken) do redis.call('ZADD', KEYS[1], now + ARGV[1], name) end
return taken
