-- POSITION: where a waiting request stands. Returns nil when it does not wait, else {requests ahead, tokens ahead,
-- tokens drained per second}. Reads only. What is ahead is what would be claimed first if nothing more came: exact for
-- one tenant in one class, else reckoned with the mean size of what waits and the shares of tenants and classes.
local MAX_TENANTS = 100 -- looked at one by one; of those behind them one request each counts
local id = ARGV[1]
local f = redis.call('HMGET', pool .. 'request:' .. id, 'engine', 'class', 'tenant', 'weight', 'suspect')
if f[1] ~= '' then return false end
local class, tenant = f[2], f[3]
local depth = 0
for _, name in ipairs(classes) do depth = depth + number_in('stats', name) end
local mean = number_in('stats', 'tokens') / math.max(1, depth)
local drain = redis.call('HGET', pool .. 'drain', 'rate') or '0'
local ahead

if f[5] then
  ahead = redis.call('ZRANK', pool .. 'suspects', id)
else
  local turns = pool .. 'turns:' .. class
  ahead = redis.call('ZRANK', pool .. 'line:' .. class .. '/' .. tenant, id)
  local reached = redis.call('ZSCORE', turns, tenant) + ahead * mean / f[4]
  local others = redis.call('ZRANGEBYSCORE', turns, '-inf', exact(reached), 'WITHSCORES', 'LIMIT', 0, MAX_TENANTS)
  for i = 1, #others, 2 do
    if others[i] ~= tenant then
      local line = pool .. 'line:' .. class .. '/' .. others[i]
      local head = redis.call('ZRANGE', line, 0, 0)[1]
      local weight = tonumber(head and redis.call('HGET', pool .. 'request:' .. head, 'weight') or 1)
      local turns_until = math.ceil((reached - others[i + 1]) * weight / mean)
      ahead = ahead + math.min(redis.call('ZCARD', line), math.max(turns_until, 0))
    end
  end
  ahead = ahead + math.max(0, redis.call('ZCOUNT', turns, '-inf', exact(reached)) - MAX_TENANTS)
  local time = number_in('virtual_time', '*')
  local reached_by_class = math.max(time, number_in('finish_tags', '*/' .. class)) + ahead * mean / class_weight[class]
  for _, other in ipairs(classes) do
    if other ~= class then
      local start = math.max(time, number_in('finish_tags', '*/' .. other))
      local turns_until = (reached_by_class - start) * class_weight[other] / mean
      -- With equal tags the more urgent class goes first.
      turns_until = class_rank[other] < class_rank[class] and math.floor(turns_until) + 1 or math.ceil(turns_until)
      ahead = ahead + math.min(redis.call('ZCARD', pool .. 'queue:' .. other), math.max(turns_until, 0))
    end
  end
  ahead = ahead + redis.call('ZCARD', pool .. 'suspects')
end
return {ahead, exact(ahead * mean), drain}
