-- REAP and hand-back: takes every request from an engine that has gone and puts it back at its old place.
-- ARGV: engine ('': every engine past its lease), deaths to count, deaths that make a request poison, length of the
-- dead-letter stream, error text. Idempotent. Returns {number requeued, cancelled, dead, expired}, the last three as
-- endings.
local only, deaths, max_deaths = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local dead_length, reason = ARGV[4], ARGV[5]
local requeued, cancelled, dead = 0, {}, {}

local function requeue(id, engine)
  local request = pool .. 'request:' .. id
  local f = redis.call('HMGET', request, 'class', 'tag', 'deadline', 'size', 'tokens', 'prompt', 'seq', 'block_size')
  redis.call('HSET', request, 'engine', '', 'attempts', redis.call('HGET', request, 'attempts') + deaths)
  if deaths > 0 then
    local before = redis.call('HGET', request, 'engines')
    redis.call('HSET', request, 'engines', before and before .. ' ' .. engine or engine)
  end
  local block_size = tonumber(f[8])
  if block_size > 0 then -- blocks on demand: what it has generated must be computed again
    redis.call('HSET', request, 'cost', math.ceil((f[6] + f[7] + 1) / block_size))
  end
  put_in_queue(id, f[1], f[2], f[3], tonumber(f[4]), tonumber(f[5]))
end

local function bury(id)
  local request = pool .. 'request:' .. id
  local f = redis.call('HMGET', request, 'attempts', 'engines', 'body')
  redis.call('XADD', pool .. 'dead', 'MAXLEN', '~', dead_length, '*', 'id', id, 'attempts', f[1],
    'engines', f[2], 'error', reason, 'request', f[3])
  dead[#dead + 1] = end_queued(id)
end

local function release(engine)
  for _, id in ipairs(redis.call('SMEMBERS', pool .. 'owned:' .. engine)) do
    local f = redis.call('HMGET', pool .. 'request:' .. id, 'engine', 'cancel', 'done', 'attempts')
    if f[1] == engine then
      requeue(id, engine)
      if f[2] then
        cancelled[#cancelled + 1] = end_queued(id)
      elseif not f[3] and deaths > 0 and tonumber(f[4]) + deaths >= max_deaths then
        bury(id)
      else
        requeued = requeued + 1
      end
    end
  end
  redis.call('DEL', pool .. 'owned:' .. engine, pool .. 'cancel:' .. engine)
  redis.call('ZREM', pool .. 'engines', engine)
  redis.call('HDEL', pool .. 'engine_stats', engine)
end

local expired = {}
if only ~= '' then
  release(only)
else
  for _, engine in ipairs(redis.call('ZRANGEBYSCORE', pool .. 'engines', '-inf', '(' .. now)) do release(engine) end
  expired = end_expired()
end
if requeued > 0 then ring() end
if #cancelled + #dead + #expired > 0 then settle_if_idle() end
return {requeued, cancelled, dead, expired}
