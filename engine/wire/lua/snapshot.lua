-- SNAPSHOT: what a gateway must know of a pool. Returns {card or false, {engine, stats, …} with live leases, number
-- waiting in the order of the classes, tokens of those}. Reads only.
local engines = {}
for _, engine in ipairs(redis.call('ZRANGEBYSCORE', pool .. 'engines', now, '+inf')) do
  engines[#engines + 1] = engine
  engines[#engines + 1] = redis.call('HGET', pool .. 'engine_stats', engine) or ''
end
local depths = {}
for i, class in ipairs(classes) do depths[i] = number_in('stats', class) end
return {redis.call('GET', pool .. 'card'), engines, depths, number_in('stats', 'tokens')}
