-- First lines of every pool script. KEYS[1] is the pool's prefix `noria:{pool}:`; it names the cluster slot, and
-- every key is made from it, so no script leaves its slot. Times are milliseconds on the server's clock.
local pool = KEYS[1]
local clock = redis.call('TIME')
local now = tonumber(clock[1]) * 1000 + math.floor(tonumber(clock[2]) / 1000)
local DAY = 86400000 -- nothing of a pool outlives its last use by more than this, whoever died
local classes = {'priority', 'default', 'flex', 'batch'}
local class_weight = {priority = 8, default = 4, flex = 1, batch = 1}

local function number_in(hash, field)
  return tonumber(redis.call('HGET', pool .. hash, field) or 0)
end

local function exact(number) -- a float keeps all its digits on the way into the store
  return string.format('%.17g', number)
end

local function ring() -- wakes one idle engine; more than one ring waiting says nothing more
  if redis.call('EXISTS', pool .. 'bell') == 0 then
    redis.call('LPUSH', pool .. 'bell', 1)
    redis.call('PEXPIRE', pool .. 'bell', DAY)
  end
end

local function num_queued()
  local total = 0
  for _, class in ipairs(classes) do
    total = total + redis.call('ZCARD', pool .. 'queue:' .. class)
  end
  return total
end

local function put_in_queue(id, class, tag, deadline, size, tokens)
  redis.call('ZADD', pool .. 'queue:' .. class, tag, id)
  redis.call('PEXPIRE', pool .. 'queue:' .. class, DAY)
  if deadline and deadline ~= '' then
    redis.call('ZADD', pool .. 'deadlines', deadline, id)
    redis.call('PEXPIRE', pool .. 'deadlines', DAY)
  end
  redis.call('HINCRBY', pool .. 'stats', 'bytes', size)
  redis.call('HINCRBY', pool .. 'stats', 'tokens', tokens)
  redis.call('PEXPIRE', pool .. 'stats', DAY)
end

local function take_from_queue(id, class, size, tokens)
  redis.call('ZREM', pool .. 'queue:' .. class, id)
  redis.call('ZREM', pool .. 'deadlines', id)
  redis.call('HINCRBY', pool .. 'stats', 'bytes', -size)
  redis.call('HINCRBY', pool .. 'stats', 'tokens', -tokens)
end

-- Ends a queued request here in the store. Returns what its final frame needs; the caller publishes that frame,
-- because frame streams lie in other slots. The epoch outranks every engine that ever held the request.
local function end_queued(id)
  local f = redis.call('HMGET', pool .. 'request:' .. id, 'class', 'size', 'tokens', 'gateway', 'epoch', 'seq', 'prompt')
  if not f[1] then -- its hash ran out of time; the queues must not keep the id
    for _, class in ipairs(classes) do redis.call('ZREM', pool .. 'queue:' .. class, id) end
    redis.call('ZREM', pool .. 'deadlines', id)
    return nil
  end
  take_from_queue(id, f[1], tonumber(f[2]), tonumber(f[3]))
  redis.call('DEL', pool .. 'request:' .. id, pool .. 'progress:' .. id)
  return {id, f[4], tonumber(f[5]) + 1, tonumber(f[6]), tonumber(f[7])}
end

local function end_expired()
  local endings = {}
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', pool .. 'deadlines', '-inf', now, 'LIMIT', 0, 64)) do
    endings[#endings + 1] = end_queued(id)
  end
  return endings
end

-- With nothing queued the counters are exact again; with nothing running either, a busy period has ended and fair
-- queueing starts afresh (start-time fair queueing sets the virtual time past every tag then: the same thing).
local function settle_if_idle()
  if num_queued() > 0 then return end
  redis.call('DEL', pool .. 'stats', pool .. 'bell')
  for _, engine in ipairs(redis.call('ZRANGE', pool .. 'engines', 0, -1)) do
    if redis.call('EXISTS', pool .. 'owned:' .. engine) == 1 then return end
  end
  redis.call('DEL', pool .. 'finish_tags', pool .. 'virtual_time')
end
