-- REAP and hand-back: takes every request from an engine that has gone and puts it back at its old place.
-- ARGV: engine ('': every engine past its lease), deaths to count, deaths that make a request poison, length of the
-- dead-letter stream, error text; with REAP the milliseconds between two looks after which nobody was looking, and those
-- that an engine then has to come back. Idempotent. Returns {number requeued, number buried, endings}: with REAP those
-- that others should have published, too.
--
-- A death counts against the suspect on trial where there is one, else against all that the engine held; and against
-- one request once per life of an engine. Whom it counts against is a suspect until it has survived a token: it waits
-- apart, and an engine tries one suspect at a time.
local only, deaths, max_deaths = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local dead_length, reason = ARGV[4], ARGV[5]
local requeued, buried, endings = 0, 0, {}

local function bury(id)
  dead_letter(id, reason, dead_length)
  buried = buried + 1
  return ending(id, 'dead')
end

-- Returns true when the death counts.
local function note_death(id, engine, life)
  local request = pool .. 'request:' .. id
  local f = redis.call('HMGET', request, 'engines', 'lives', 'attempts')
  if f[2] and string.find(f[2], ' ' .. life .. ' ', 1, true) then return false end
  redis.call('HSET', request, 'engines', f[1] and f[1] .. ' ' .. engine or engine,
    'lives', (f[2] or ' ') .. life .. ' ', 'attempts', f[3] + 1, 'suspect', 1)
  return true
end

local function put_back(id)
  local request = pool .. 'request:' .. id
  local f = redis.call('HMGET', request, 'class', 'tenant', 'place', 'arrival', 'deadline', 'size', 'tokens', 'weight',
    'prompt', 'seq', 'block_size', 'suspect')
  local class, tenant, tokens, block_size = f[1], f[2], tonumber(f[7]), tonumber(f[11])
  redis.call('HSET', request, 'engine', '', 'since', now)
  if block_size > 0 then -- blocks on demand: what it has generated must be computed again
    redis.call('HSET', request, 'cost', math.ceil((f[9] + f[10] + 1) / block_size))
  end
  if f[12] then
    redis.call('ZADD', pool .. 'suspects', class_rank[class] * 2 ^ 40 + f[4], id)
    redis.call('PEXPIRE', pool .. 'suspects', DAY)
  else
    put_in_queue(id, class, tenant, f[3], f[4], give_back(class, tenant, tokens, tonumber(f[8])))
  end
  set_deadline(id, f[5])
  count(1, class, tenant, tonumber(f[6]), tokens)
  requeued = requeued + 1
end

local function release(engine)
  local trial = redis.call('HGET', pool .. 'trials', engine)
  local life = redis.call('HGET', pool .. 'lives', engine) or engine
  try(fold, engine, redis.call('LRANGE', pool .. 'journal:' .. engine, 0, -1)) -- what is unreadable is computed again
  local held = redis.call('HGETALL', pool .. 'owned:' .. engine)
  local function release_one(id, state)
    local _, seq, done = string.match(state, '^(%d+) (%d+)(.*)$')
    local request = pool .. 'request:' .. id
    local f = redis.call('HMGET', request, 'engine', 'cancel', 'attempts', 'class', 'tenant', 'tokens', 'prompt', 'weight')
    if f[1] == engine then
      redis.call('HSET', request, 'seq', seq)
      if done ~= '' then redis.call('HSET', request, 'done', 1) end
      local counts = deaths > 0 and done == '' and (not trial or trial == id) and note_death(id, engine, life)
      local poison = counts and f[3] + 1 >= max_deaths
      if f[2] or poison then
        give_back(f[4], f[5], f[6] - f[7] - seq, tonumber(f[8]))
        endings[#endings + 1] = f[2] and ending(id, 'cancelled') or bury(id)
      else
        put_back(id)
      end
    end
  end
  for i = 1, #held, 2 do
    local _, broken = guarded(held[i], engine, release_one, held[i], held[i + 1])
    endings[#endings + 1] = broken
  end
  redis.call('DEL', pool .. 'owned:' .. engine, pool .. 'journal:' .. engine, pool .. 'cancel:' .. engine)
  redis.call('ZREM', pool .. 'engines', engine)
  for _, hash in ipairs({'engine_stats', 'trials', 'lives', 'rooms'}) do redis.call('HDEL', pool .. hash, engine) end
end

-- While the store was away nobody could renew a lease: one that ran out then, since the last look, is prolonged. Once: its
-- end is marked by half a millisecond, which no renewal has.
local function is_excused(ends, last_look)
  return last_look and now - last_look > tonumber(ARGV[6]) and ends >= last_look and ends % 1 == 0
end

local function reap()
  local last_look = tonumber(redis.call('GET', pool .. 'last_look') or '')
  local lapsed = redis.call('ZRANGEBYSCORE', pool .. 'engines', '-inf', '(' .. now, 'WITHSCORES')
  for i = 1, #lapsed, 2 do
    if is_excused(tonumber(lapsed[i + 1]), last_look) then
      redis.call('ZADD', pool .. 'engines', exact(now + ARGV[7] + 0.5), lapsed[i])
    else
      release(lapsed[i])
    end
  end
  if redis.call('EXISTS', pool .. 'engines') == 1 then
    redis.call('SET', pool .. 'last_look', now, 'PX', DAY)
  else
    redis.call('DEL', pool .. 'last_look')
  end
end

if only ~= '' then
  release(only)
else
  reap()
  endings = {}
  end_expired()
  for _, packed in ipairs(redis.call('HVALS', pool .. 'endings')) do endings[#endings + 1] = cmsgpack.unpack(packed) end
end
if requeued > 0 then ring() end
if #endings > 0 then settle_if_idle() end
return {requeued, buried, endings}
