-- First lines of every pool script. KEYS[1] is the pool's prefix `noria:{pool}:`; it names the cluster slot, and
-- every key is made from it, so no script leaves its slot. No key is ever called so: a cluster that moves the slot
-- misses it at both ends and refuses the script before it begins. Times are milliseconds on the server's clock.
local pool = KEYS[1]
local clock = redis.call('TIME')
local now = tonumber(clock[1]) * 1000 + math.floor(tonumber(clock[2]) / 1000)
local DAY = 86400000 -- nothing of a pool outlives its last use by more than this, whoever died
local classes = {'priority', 'default', 'flex', 'batch'}
local class_weight = {priority = 8, default = 4, flex = 1, batch = 1}
local class_rank = {priority = 0, default = 1, flex = 2, batch = 3}

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
  local total = redis.call('ZCARD', pool .. 'suspects')
  for _, class in ipairs(classes) do
    total = total + redis.call('ZCARD', pool .. 'queue:' .. class)
  end
  return total
end

-- What waits, counted: per pool in `stats` (by class, bytes, tokens), per tenant in `tenants`.
local function count(sign, class, tenant, size, tokens)
  size, tokens = sign * size + 0, sign * tokens + 0 -- never "-0", which is no integer to the store
  local stats, tenants = pool .. 'stats', pool .. 'tenants'
  redis.call('HINCRBY', stats, class, sign)
  redis.call('HINCRBY', stats, 'bytes', size)
  redis.call('HINCRBY', stats, 'tokens', tokens)
  local depth = redis.call('HINCRBY', tenants, 'depth:' .. tenant, sign)
  redis.call('HINCRBY', tenants, 'bytes:' .. tenant, size)
  redis.call('HINCRBY', tenants, 'tokens:' .. tenant, tokens)
  if depth <= 0 then
    redis.call('HDEL', tenants, 'depth:' .. tenant, 'bytes:' .. tenant, 'tokens:' .. tenant)
  end
  if sign > 0 then
    redis.call('PEXPIRE', stats, DAY)
    redis.call('PEXPIRE', tenants, DAY)
  end
end

-- A class's queue is three sets: `queue`, every request by its arrival; `line`, one tenant's requests in their order
-- (`place`: priority, then arrival); `turns`, the start tags of the tenants that have a line.
local function put_in_queue(id, class, tenant, place, arrival, start)
  local line, turns = pool .. 'line:' .. class .. '/' .. tenant, pool .. 'turns:' .. class
  redis.call('ZADD', pool .. 'queue:' .. class, arrival, id)
  redis.call('ZADD', line, place, id)
  redis.call('ZADD', turns, exact(start), tenant)
  redis.call('PEXPIRE', pool .. 'queue:' .. class, DAY)
  redis.call('PEXPIRE', line, DAY)
  redis.call('PEXPIRE', turns, DAY)
end

local function set_deadline(id, deadline)
  if deadline and deadline ~= '' then
    redis.call('ZADD', pool .. 'deadlines', deadline, id)
    redis.call('PEXPIRE', pool .. 'deadlines', DAY)
  end
end

-- Returns whether it was in the queue of its class (else it was a suspect).
local function take_from_queue(id, class, tenant, size, tokens)
  local line = pool .. 'line:' .. class .. '/' .. tenant
  local queued = redis.call('ZREM', pool .. 'queue:' .. class, id) == 1
  if queued then
    redis.call('ZREM', line, id)
    if redis.call('EXISTS', line) == 0 then redis.call('ZREM', pool .. 'turns:' .. class, tenant) end
  else
    redis.call('ZREM', pool .. 'suspects', id)
  end
  redis.call('ZREM', pool .. 'deadlines', id)
  count(-1, class, tenant, size, tokens)
  return queued
end

-- Takes `amount` tokens, charged at the claim, off the tenant's and the class's account. Returns the tenant's finish
-- tag, which a requeued request starts at.
local function give_back(class, tenant, amount, weight)
  local tags, field = pool .. 'finish_tags', class .. '/' .. tenant
  local time = number_in('virtual_time', class)
  local tag = tonumber(redis.call('HGET', tags, field) or time) - amount / weight
  redis.call('HSET', tags, field, exact(tag))
  redis.call('PEXPIRE', tags, DAY)
  local of_class = redis.call('HGET', tags, '*/' .. class)
  if of_class then redis.call('HSET', tags, '*/' .. class, exact(of_class - amount / class_weight[class])) end
  local turn = redis.call('ZSCORE', pool .. 'turns:' .. class, tenant)
  if turn and math.max(tag, time) < tonumber(turn) then
    redis.call('ZADD', pool .. 'turns:' .. class, exact(math.max(tag, time)), tenant)
  end
  return tag
end

-- Calls `work`; returns true and its result, or false and what went wrong. What says that the store cannot be written now
-- is nobody's fault and goes through.
local CANNOT_WRITE = {OOM = true, READONLY = true, MISCONF = true, NOREPLICAS = true}
local function try(work, ...)
  local ok, result = pcall(work, ...)
  if ok then return true, result end
  local problem = type(result) == 'table' and result.err or tostring(result)
  if CANNOT_WRITE[string.match(problem, '^%-?(%u+)') or ''] then error(result, 0) end
  return false, problem
end

-- One entry of the ledger: what a request with an account has used, written in the very script that ends it, so that
-- there is one for each, whoever dies. `counted` is what its client has had, where its gateway stopped reading before
-- the engine stopped. A request that no engine ever took has used nothing.
local function note_usage(id, output, cached, reason, engine, prefill, decode)
  local f = redis.call('HMGET', pool .. 'request:' .. id, 'account', 'class', 'billed', 'accepted', 'claimed', 'counted',
    'why')
  if not f[1] then return end
  if f[6] then output = math.min(output, tonumber(f[6])) end
  if f[7] and reason == 'cancelled' then reason = f[7] end
  redis.call('XADD', pool .. 'ledger', '*', 'id', id, 'account', f[1], 'class', f[2], 'at', now,
    'prompt', f[5] and f[3] or 0, 'cached', math.min(cached, f[5] and tonumber(f[3]) or 0), 'output', output,
    'reason', reason, 'engine', engine, 'queue_ms', (f[5] or now) - f[4], 'prefill_ms', prefill, 'decode_ms', decode)
  redis.call('PEXPIRE', pool .. 'ledger', 30 * DAY)
end

-- Lets go of a request that ends here in the store. Returns what its final frames need, its progress too: an engine
-- may have died between recording a frame and publishing it. The caller publishes them, because the streams lie in
-- other slots, and takes the ending out of `endings` then. Until that is done every reaper gets it too, so that no lost
-- reply loses it. The epoch outranks every engine that ever held the request.
local function ending(id, reason)
  local request = pool .. 'request:' .. id
  local f = redis.call('HMGET', request, 'gateway', 'epoch', 'seq', 'prompt', 'logged')
  local progress = redis.call('GET', pool .. 'progress:' .. id) or ''
  local function number(text) return tonumber(text or 0) or 0 end -- of a record that is broken, too
  try(note_usage, id, number(f[3]), 0, reason, '', 0, 0)
  redis.call('DEL', request, pool .. 'progress:' .. id)
  local last = {id, f[1] or '', number(f[2]) + 1, number(f[3]), number(f[4]), number(f[5]), reason, progress}
  redis.call('HSET', pool .. 'endings', id, cmsgpack.pack(last))
  redis.call('PEXPIRE', pool .. 'endings', DAY)
  return last
end

local function dead_letter(id, reason, length)
  local f = redis.call('HMGET', pool .. 'request:' .. id, 'attempts', 'engines', 'body')
  redis.call('XADD', pool .. 'dead', 'MAXLEN', '~', length, '*', 'id', id, 'attempts', f[1] or 0,
    'engines', f[2] or '', 'error', reason, 'request', f[3] or '')
end

-- Does one request's part of a script. A record that a script stumbles over (another version's, or edited by hand) must
-- not stop the pool for all others, call after call: that request alone is given up, and its dead letter says why.
-- Returns what `work` returns, or nil and the ending to publish.
local function guarded(id, engine, work, ...)
  local ok, result = try(work, ...)
  if ok then return result end
  redis.log(redis.LOG_WARNING, 'request ' .. id .. ' is given up: ' .. result)
  local request, progress = pool .. 'request:' .. id, pool .. 'progress:' .. id
  if redis.call('TYPE', request).ok ~= 'hash' then redis.call('DEL', request) end
  if redis.call('TYPE', progress).ok ~= 'string' then redis.call('DEL', progress) end
  for _, class in ipairs(classes) do
    local waited = redis.call('ZREM', pool .. 'queue:' .. class, id) == 1
    for _, tenant in ipairs(waited and redis.call('ZRANGE', pool .. 'turns:' .. class, 0, -1) or {}) do
      local line = pool .. 'line:' .. class .. '/' .. tenant
      if redis.call('ZREM', line, id) == 1 then
        local f = redis.call('HMGET', request, 'size', 'tokens')
        count(-1, class, tenant, tonumber(f[1] or 0) or 0, tonumber(f[2] or 0) or 0)
        if redis.call('EXISTS', line) == 0 then redis.call('ZREM', pool .. 'turns:' .. class, tenant) end
      end
    end
  end
  redis.call('ZREM', pool .. 'suspects', id)
  redis.call('ZREM', pool .. 'deadlines', id)
  if engine then redis.call('HDEL', pool .. 'owned:' .. engine, id) end
  dead_letter(id, 'its record cannot be used: ' .. result, 1000)
  return nil, ending(id, 'broken')
end

local function end_queued(id, reason)
  local f = redis.call('HMGET', pool .. 'request:' .. id, 'class', 'tenant', 'size', 'tokens', 'prompt', 'seq', 'weight')
  if not f[1] then -- its hash ran out of time; the queues must not keep the id
    for _, class in ipairs(classes) do redis.call('ZREM', pool .. 'queue:' .. class, id) end
    redis.call('ZREM', pool .. 'suspects', id)
    redis.call('ZREM', pool .. 'deadlines', id)
    return nil
  end
  local class, tenant, tokens = f[1], f[2], tonumber(f[4])
  if not take_from_queue(id, class, tenant, tonumber(f[3]), tokens) then -- a suspect: it has been charged
    give_back(class, tenant, tokens - f[5] - f[6], tonumber(f[7]))
  end
  return ending(id, reason)
end

local function end_expired()
  local endings = {}
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', pool .. 'deadlines', '-inf', now, 'LIMIT', 0, 64)) do
    local last, broken = guarded(id, nil, end_queued, id, 'expired')
    endings[#endings + 1] = last or broken
  end
  return endings
end

-- With nothing queued the counters are exact again; with nothing running either, a busy period has ended and fair
-- queueing starts afresh (start-time fair queueing sets the virtual time past every tag then: the same thing).
local function settle_if_idle()
  if num_queued() > 0 then return end
  redis.call('DEL', pool .. 'stats', pool .. 'tenants', pool .. 'bell')
  for _, engine in ipairs(redis.call('ZRANGE', pool .. 'engines', 0, -1)) do
    if redis.call('EXISTS', pool .. 'owned:' .. engine) == 1 then return end
  end
  redis.call('DEL', pool .. 'finish_tags', pool .. 'virtual_time')
  if redis.call('HEXISTS', pool .. 'drain', 'at') == 1 then redis.call('HSET', pool .. 'drain', 'at', 0) end
end
