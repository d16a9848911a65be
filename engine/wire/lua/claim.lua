-- CLAIM, with FINISH before it: one engine's turn at an iteration boundary. Renews the lease, deletes what the engine
-- finished (its last frame went out just before, in the same pipeline), drops what passed its deadline in the queue,
-- and takes at most max_requests requests that cost at most max_blocks KV blocks together.
-- Returns {1, claimed, cancelled ids, endings of expired requests}, or {0} when the lease is gone; a claimed request is
-- {{id, gateway, epoch, seq, prompt tokens}, body, progress}.
local engine, lease, max_requests, blocks = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local stats, resync, card_ttl = ARGV[5], ARGV[6] == '1', ARGV[7]
local lookahead, max_age, num_finished = tonumber(ARGV[8]), tonumber(ARGV[9]), tonumber(ARGV[10])
local owned = pool .. 'owned:' .. engine

if not redis.call('ZSCORE', pool .. 'engines', engine) or redis.call('PEXPIRE', pool .. 'card', card_ttl) == 0 then
  return {0}
end
redis.call('ZADD', pool .. 'engines', now + lease, engine)
redis.call('PEXPIRE', pool .. 'engines', DAY)
redis.call('PEXPIRE', pool .. 'tokenizer', card_ttl)
if stats ~= '' then
  redis.call('HSET', pool .. 'engine_stats', engine, stats)
  redis.call('PEXPIRE', pool .. 'engine_stats', DAY)
end

-- FINISH: the estimate prompt + max_tokens in the tenant's finish tag becomes the true count (virtual token counter).
local function finish(id, epoch, completion)
  local request = pool .. 'request:' .. id
  local f = redis.call('HMGET', request, 'engine', 'epoch', 'class', 'tenant', 'tokens', 'weight', 'prompt')
  if f[1] ~= engine or f[2] ~= epoch then return end
  redis.call('DEL', request, pool .. 'progress:' .. id)
  redis.call('SREM', owned, id)
  local field = f[3] .. '/' .. f[4]
  local tag = redis.call('HGET', pool .. 'finish_tags', field)
  if tag then
    local true_tag = tonumber(tag) + (tonumber(f[7]) + completion - tonumber(f[5])) / tonumber(f[6])
    if true_tag > number_in('virtual_time', f[3]) then
      redis.call('HSET', pool .. 'finish_tags', field, exact(true_tag))
    else
      redis.call('HDEL', pool .. 'finish_tags', field) -- the virtual time has passed it: it says nothing any more
    end
  end
end
for i = 11, 10 + 3 * num_finished, 3 do finish(ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2])) end

local claimed, cancelled = {}, redis.call('LRANGE', pool .. 'cancel:' .. engine, 0, -1)
if #cancelled > 0 then redis.call('DEL', pool .. 'cancel:' .. engine) end

local function hand_over(id, epoch)
  local request = pool .. 'request:' .. id
  local f = redis.call('HMGET', request, 'gateway', 'seq', 'prompt', 'body')
  claimed[#claimed + 1] = {{id, f[1], tonumber(epoch), tonumber(f[2]), tonumber(f[3])}, f[4],
    redis.call('GET', pool .. 'progress:' .. id) or ''}
end

-- After a lost reply the engine names what it knows that it holds; the rest is handed over again.
if resync then
  local known = {}
  for i = 11 + 3 * num_finished, #ARGV do known[ARGV[i]] = true end
  for _, id in ipairs(redis.call('SMEMBERS', owned)) do
    local f = redis.call('HMGET', pool .. 'request:' .. id, 'engine', 'epoch', 'cancel')
    if f[1] ~= engine then
      redis.call('SREM', owned, id)
    else
      if not known[id] then hand_over(id, f[2]) end
      if f[3] then cancelled[#cancelled + 1] = id end
    end
  end
end

local expired = end_expired()

-- Each class is a flow of weight 8:4:1:1 under start-time fair queueing in tokens; `queues` keeps their order, so the
-- more urgent class wins a tie.
local queues, class_time = {}, 0
if max_requests > 0 and blocks > 0 then
  class_time = number_in('virtual_time', '*')
  for _, class in ipairs(classes) do
    local ids = redis.call('ZRANGE', pool .. 'queue:' .. class, 0, max_requests + lookahead - 1)
    if #ids > 0 then
      queues[#queues + 1] = {class = class, ids = ids, next = 1, skipped = 0, taken = 0,
        finish = number_in('finish_tags', '*/' .. class), time = number_in('virtual_time', class)}
    end
  end
end

local function next_queue()
  local best, best_start
  for _, queue in ipairs(queues) do
    local start = math.max(class_time, queue.finish)
    if queue.next <= #queue.ids and (not best or start < best_start) then best, best_start = queue, start end
  end
  return best, best_start
end

local function take(queue, start, id, f) -- f: cost, tokens, size, tag, epoch
  local request = pool .. 'request:' .. id
  local tokens, epoch = tonumber(f[2]), tonumber(f[5]) + 1
  take_from_queue(id, queue.class, tonumber(f[3]), tokens)
  redis.call('HSET', request, 'engine', engine, 'epoch', epoch)
  redis.call('HDEL', request, 'skipped')
  redis.call('SADD', owned, id)
  hand_over(id, epoch)
  blocks = blocks - tonumber(f[1])
  queue.taken = queue.taken + 1
  queue.time = math.max(queue.time, tonumber(f[4]))
  class_time, queue.finish = start, start + tokens / class_weight[queue.class]
end

local num_taken, closed = 0, false
while num_taken < max_requests and blocks > 0 and not closed do
  local queue, start = next_queue()
  if not queue then break end
  local id = queue.ids[queue.next]
  queue.next = queue.next + 1
  local f = redis.call('HMGET', pool .. 'request:' .. id, 'cost', 'tokens', 'size', 'tag', 'epoch', 'skipped')
  if not f[1] then
    end_queued(id)
  elseif tonumber(f[1]) <= blocks then
    take(queue, start, id, f)
    num_taken = num_taken + 1
  else
    queue.skipped = queue.skipped + 1
    if queue.skipped == 1 then -- the head: others may pass it for max_age at most
      if not f[6] then
        redis.call('HSET', pool .. 'request:' .. id, 'skipped', now)
      elseif now - tonumber(f[6]) >= max_age then
        closed = true
        -- An engine that holds nothing has offered all it has: it takes the head and ends it, should it never fit.
        if num_taken == 0 and redis.call('EXISTS', owned) == 0 then take(queue, start, id, f) end
      end
    elseif queue.skipped > lookahead then
      queue.next = #queue.ids + 1
    end
  end
end

for _, queue in ipairs(queues) do
  if queue.taken > 0 then
    redis.call('HSET', pool .. 'virtual_time', queue.class, exact(queue.time), '*', exact(class_time))
    redis.call('HSET', pool .. 'finish_tags', '*/' .. queue.class, exact(queue.finish))
    redis.call('PEXPIRE', pool .. 'virtual_time', DAY)
    redis.call('PEXPIRE', pool .. 'finish_tags', DAY)
  end
end
if #claimed > 0 then
  redis.call('PEXPIRE', owned, DAY)
  if num_queued() > 0 then ring() end -- there is more: another idle engine may take it
end
if num_finished > 0 or #expired > 0 or #claimed > 0 then settle_if_idle() end
return {1, claimed, cancelled, expired}
