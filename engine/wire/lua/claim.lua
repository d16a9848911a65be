-- CLAIM, with FINISH before it: one engine's turn at an iteration boundary. Renews the lease, deletes what the engine
-- finished (its last frame went out just before, in the same pipeline), drops what passed its deadline in the queue,
-- and takes requests as long as their class has room: max_requests and max_blocks (of the KV memory) say how much, one
-- number for all classes or one for each, by rank. What is taken uses up the room of every class; a higher class may
-- have more of it, since others give way to it.
-- Returns {1, claimed, cancelled ids, endings of requests that expired or cannot be used, ids that are no longer this
-- engine's}, or {0} when the lease is gone; a claimed request is {{id, gateway, epoch, seq, prompt tokens, 1 if logged},
-- body, progress}.
--
-- Who is next: a suspect, if none is on this engine's trial already; else the class whose turn it is, and in it the
-- tenant whose turn it is, and of that tenant the first in line. Both turns are start-time fair queueing in tokens,
-- charged at the claim and corrected at the end. The request that has waited longest in its class may be passed over
-- by max_passed_over others; then it is next, whoever's turn it is, and charged as ever.
--
-- Who takes it: an engine leaves to those that hold less, and have the room, what they can take until they hold as
-- much, and ends its claim with that. Once somebody has waited for max_left, every engine takes what it can.
local engine, lease = ARGV[1], tonumber(ARGV[2])
local stats, resync = ARGV[5], ARGV[6] == '1'
local lookahead, max_age, max_passed_over = tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[9])
local max_left, num_finished = tonumber(ARGV[10]), tonumber(ARGV[11])
local owned = pool .. 'owned:' .. engine

-- The lease itself is renewed here, all that lives as long as the pool is used by LEASE, once in a while.
if not redis.call('ZSCORE', pool .. 'engines', engine) or redis.call('EXISTS', pool .. 'card') == 0 then return {0} end
redis.call('ZADD', pool .. 'engines', now + lease, engine)
if stats ~= '' then redis.call('HSET', pool .. 'engine_stats', engine, stats) end
local trial = redis.call('HGET', pool .. 'trials', engine)

-- FINISH: the estimate prompt + max_tokens in the tenant's account becomes the true count (virtual token counter).
local drained = 0
local function finish(id, epoch, completion, details)
  local request = pool .. 'request:' .. id
  local f = redis.call('HMGET', request, 'engine', 'epoch', 'class', 'tenant', 'tokens', 'weight', 'prompt')
  if f[1] ~= engine or f[2] ~= epoch then return end
  if details ~= '' then
    local cached, reason, prefill, decode = string.match(details, '^(%d+) (%a+) (%d+) (%d+)$')
    note_usage(id, completion, tonumber(cached), reason, engine, prefill, decode)
  end
  redis.call('DEL', request, pool .. 'progress:' .. id)
  redis.call('HDEL', owned, id)
  if id == trial then
    redis.call('HDEL', pool .. 'trials', engine)
    trial = false
  end
  drained = drained + tonumber(f[5])
  local class, tenant = f[3], f[4]
  local tag = give_back(class, tenant, f[5] - f[7] - completion, tonumber(f[6]))
  if tag <= number_in('virtual_time', class) then -- the virtual time has passed it: it says nothing any more
    redis.call('HDEL', pool .. 'finish_tags', class .. '/' .. tenant)
  end
end
for i = 12, 11 + 4 * num_finished, 4 do
  local id = ARGV[i]
  if not try(finish, id, ARGV[i + 1], tonumber(ARGV[i + 2]), ARGV[i + 3]) then -- its record is broken, but its answer is out
    redis.call('DEL', pool .. 'request:' .. id, pool .. 'progress:' .. id)
    redis.call('HDEL', owned, id)
  end
end
if num_finished > 0 and redis.call('EXISTS', owned) == 0 then redis.call('DEL', pool .. 'journal:' .. engine) end

-- The drain rate: tokens finished per second while there is work, in the unit in which the queue is counted (prompt
-- + max_tokens), smoothed over about ten seconds of the server's clock.
local function note_drained()
  local f = redis.call('HMGET', pool .. 'drain', 'at', 'tokens', 'rate')
  local at, tokens = tonumber(f[1] or 0), (f[2] or 0) + drained
  if at == 0 then
    redis.call('HSET', pool .. 'drain', 'at', now, 'tokens', 0)
  elseif now - at < 500 then
    if drained > 0 then redis.call('HSET', pool .. 'drain', 'tokens', tokens) end
  elseif drained > 0 then
    local measured = tokens * 1000 / (now - at)
    local rate = tonumber(f[3] or measured)
    rate = rate + (1 - math.exp((at - now) / 10000)) * (measured - rate)
    redis.call('HSET', pool .. 'drain', 'at', now, 'tokens', 0, 'rate', exact(rate))
  end
end
if drained > 0 then note_drained() end

local claimed, cancelled = {}, redis.call('LRANGE', pool .. 'cancel:' .. engine, 0, -1)
if #cancelled > 0 then redis.call('DEL', pool .. 'cancel:' .. engine) end

local function hand_over(id, epoch, seq)
  local f = redis.call('HMGET', pool .. 'request:' .. id, 'gateway', 'prompt', 'logged', 'body')
  if not (f[1] and tonumber(f[2]) and tonumber(f[3]) and f[4]) then error('fields are missing') end
  claimed[#claimed + 1] = {{id, f[1], tonumber(epoch), tonumber(seq), tonumber(f[2]), tonumber(f[3])}, f[4],
    redis.call('GET', pool .. 'progress:' .. id) or ''}
end

-- After a lost reply the engine names what it knows that it holds. What it does not know is handed over again; what is
-- not its own any more (the store may have lost its last second) it has to drop.
local fenced, endings = {}, {}
if resync then
  local known = {}
  for i = 12 + 4 * num_finished, #ARGV do
    known[ARGV[i]] = true
    if redis.call('HEXISTS', owned, ARGV[i]) == 0 then fenced[#fenced + 1] = ARGV[i] end
  end
  local held = redis.call('HGETALL', owned)
  for i = 1, #held, 2 do
    local id, epoch, seq = held[i], string.match(held[i + 1], '^(%d+) (%d+)')
    local f = redis.call('HMGET', pool .. 'request:' .. id, 'engine', 'cancel')
    if f[1] ~= engine then
      redis.call('HDEL', owned, id)
    else
      if not known[id] then
        local _, broken = guarded(id, engine, hand_over, id, epoch, seq)
        endings[#endings + 1] = broken
      end
      if f[2] then cancelled[#cancelled + 1] = id end
    end
  end
end

for _, last in ipairs(end_expired()) do endings[#endings + 1] = last end
local num_taken, blocks_taken, closed = 0, 0, false
local slots, blocks, most_slots = {}, {}, 0 -- by class

local function by_class(list, into)
  local numbers = {}
  for number in string.gmatch(list, '%S+') do numbers[#numbers + 1] = tonumber(number) end
  for _, class in ipairs(classes) do into[class] = numbers[class_rank[class] + 1] or numbers[#numbers] end
end

by_class(ARGV[3], slots)
by_class(ARGV[4], blocks)
for _, number in pairs(slots) do most_slots = math.max(most_slots, number) end

local function has_room(class)
  return slots[class] > num_taken and blocks[class] > blocks_taken
end

local function fits(f)
  return tonumber(f[1]) <= blocks[f[9]] - blocks_taken
end

-- What this engine holds, and what the others said at their last claims: what they hold and the room that they have
-- left without anybody giving way. Only an engine's own claims change that, but that it goes.
local alone = redis.call('ZCARD', pool .. 'engines') == 1
local held, peers, left = redis.call('HLEN', owned), nil, false

local function read_peers()
  peers = {}
  local live = redis.call('ZRANGEBYSCORE', pool .. 'engines', now, '+inf')
  for i, room in ipairs(redis.call('HMGET', pool .. 'rooms', unpack(live))) do
    local holds, free_slots, free_blocks = string.match(room or '', '^(%d+) (%d+) (%d+)$')
    if holds and live[i] ~= engine then
      peers[#peers + 1] = {held = tonumber(holds), slots = tonumber(free_slots), blocks = tonumber(free_blocks)}
    end
  end
end

local function somebody_has_waited()
  for _, class in ipairs(classes) do
    local oldest = redis.call('ZRANGE', pool .. 'queue:' .. class, 0, 0)[1]
    local _, since = try(redis.call, 'HGET', pool .. 'request:' .. (oldest or ''), 'since')
    if oldest and now - (tonumber(since) or 0) >= max_left then return true end
  end
  return false
end

-- Whether others should take a request of this many blocks, and all that waits beside it. Where somebody would have to
-- give way for it here, any free place elsewhere is better.
local function is_for_others(cost)
  if alone then return false end
  if not peers then read_peers() end
  local has_place = slots.batch > num_taken and cost <= blocks.batch - blocks_taken
  local mine, theirs = has_place and held + num_taken or math.huge, 0
  for _, peer in ipairs(peers) do
    local places = math.min(peer.slots, math.floor(peer.blocks / math.max(1, cost)))
    theirs = theirs + math.max(0, math.min(places, mine - peer.held))
  end
  return theirs > 0 and num_queued() <= theirs and not somebody_has_waited()
end

local FIELDS = {'cost', 'tokens', 'size', 'epoch', 'skipped', 'tenant', 'weight', 'seq', 'class', 'done',
  'account'}

local function look(id)
  local f = redis.call('HMGET', pool .. 'request:' .. id, unpack(FIELDS))
  for _, i in ipairs(f[1] and {1, 2, 3, 4, 7, 8} or {}) do -- before anything is changed
    if not tonumber(f[i]) then error(FIELDS[i] .. ' is not a number') end
  end
  if f[1] and not (f[6] and class_rank[f[9]]) then error('it has no tenant, or no class') end
  return f
end

local function take(id, f) -- returns nothing; the queues and the engine's set change hands
  local epoch = tonumber(f[4]) + 1
  take_from_queue(id, f[9], f[6], tonumber(f[3]), tonumber(f[2]))
  redis.call('HSET', pool .. 'request:' .. id, 'engine', engine, 'epoch', epoch)
  redis.call('HDEL', pool .. 'request:' .. id, 'skipped')
  if f[11] then redis.call('HSETNX', pool .. 'request:' .. id, 'claimed', now) end
  redis.call('HSET', owned, id, epoch .. ' ' .. f[8] .. (f[10] and ' done' or ''))
  hand_over(id, epoch, f[8])
  blocks_taken = blocks_taken + tonumber(f[1])
  num_taken = num_taken + 1
end

-- A head that does not fit: others may pass it for max_age at most. Returns true when this engine takes it all the
-- same: an engine that holds nothing has offered all it has, and ends it, should it never fit.
local function wait_to_fit(id, f)
  if not f[5] then
    redis.call('HSET', pool .. 'request:' .. id, 'skipped', now)
  elseif now - tonumber(f[5]) >= max_age then
    closed = true
    return num_taken == 0 and redis.call('EXISTS', owned) == 0
  end
  return false
end

-- Returns whether it was taken.
local function consider_suspect(id, is_first)
  local f = look(id)
  if not f[1] then
    end_queued(id)
  elseif has_room(f[9]) and (fits(f) or (is_first and wait_to_fit(id, f))) then
    take(id, f)
    redis.call('HSET', pool .. 'trials', engine, id)
    redis.call('PEXPIRE', pool .. 'trials', DAY)
    return true
  end
  return false
end

local function try_suspect()
  for i, id in ipairs(redis.call('ZRANGE', pool .. 'suspects', 0, lookahead)) do
    local taken, broken = guarded(id, nil, consider_suspect, id, i == 1)
    endings[#endings + 1] = broken
    if taken or closed then return end
  end
end

local flows, class_time = {}, 0
local window = most_slots + lookahead

local function open_flow(class)
  local queue = pool .. 'queue:' .. class
  local oldest = redis.call('ZRANGE', queue, 0, 0)[1]
  if not oldest then return end
  local flow = {class = class, oldest = oldest, passed = number_in('virtual_time', 'passed/' .. class), skipped = 0,
    taken = 0, finish = number_in('finish_tags', '*/' .. class), time = number_in('virtual_time', class),
    gone = {}, tenants = {}}
  local turns = redis.call('ZRANGE', pool .. 'turns:' .. class, 0, window - 1, 'WITHSCORES')
  for i = 1, #turns, 2 do
    flow.tenants[#flow.tenants + 1] = {name = turns[i], start = tonumber(turns[i + 1]), offset = 0, next = 1}
  end
  flows[#flows + 1] = flow
end

-- The tenant whose turn it is, the first by name among equals, with the first of its line that has not been looked at.
local function next_in(flow)
  while true do
    local best, best_tag
    for _, tenant in ipairs(flow.tenants) do
      local tag = tenant.start + tenant.offset
      if not best or tag < best_tag or (tag == best_tag and tenant.name < best.name) then best, best_tag = tenant, tag end
    end
    if not best then return nil end
    best.ids = best.ids or redis.call('ZRANGE', pool .. 'line:' .. flow.class .. '/' .. best.name, 0, window - 1)
    while best.ids[best.next] and flow.gone[best.ids[best.next]] do best.next = best.next + 1 end
    if best.ids[best.next] then return best.ids[best.next], best end
    for i, tenant in ipairs(flow.tenants) do
      if tenant == best then table.remove(flow.tenants, i) end
    end
  end
end

local function next_flow()
  local best, best_start
  for _, flow in ipairs(flows) do
    local start = math.max(class_time, flow.finish)
    if has_room(flow.class) and (not best or start < best_start) then best, best_start = flow, start end
  end
  return best, best_start
end

local function drop(flow)
  flow.closed = true
  for i, other in ipairs(flows) do
    if other == flow then table.remove(flows, i) end
  end
end

-- Takes it on the account of its tenant and its class.
local function take_turn(flow, class_start, id, f, in_turn)
  local name, tokens = f[6], tonumber(f[2])
  local turns, field = pool .. 'turns:' .. flow.class, flow.class .. '/' .. name
  local start = tonumber(redis.call('ZSCORE', turns, name))
  local finish_tag = start + tokens / tonumber(f[7])
  take(id, f)
  redis.call('HSET', pool .. 'finish_tags', field, exact(finish_tag))
  redis.call('ZADD', turns, 'XX', exact(finish_tag), name)
  for _, tenant in ipairs(flow.tenants) do
    if tenant.name == name then tenant.start = finish_tag end
  end
  if in_turn then flow.time = math.max(flow.time, start) end
  flow.taken = flow.taken + 1
  class_time, flow.finish = class_start, class_start + tokens / class_weight[flow.class]
  if id == flow.oldest then
    flow.passed, flow.oldest = 0, redis.call('ZRANGE', pool .. 'queue:' .. flow.class, 0, 0)[1]
  else
    flow.passed = flow.passed + 1
  end
end

-- One that is next: it is taken, left to others, or waits until it fits.
local function consider(flow, class_start, id, tenant, overdue)
  local f = look(id)
  if not f[1] then
    end_queued(id)
    redis.call('ZREM', pool .. 'line:' .. flow.class .. '/' .. (tenant and tenant.name or ''), id)
  elseif fits(f) then
    if is_for_others(tonumber(f[1])) then
      left, closed = true, true
    else
      take_turn(flow, class_start, id, f, not overdue)
    end
  else
    flow.skipped = flow.skipped + 1
    if flow.skipped == 1 and wait_to_fit(id, f) then take_turn(flow, class_start, id, f, not overdue) end
    if tenant and not overdue then tenant.offset = tenant.offset + tonumber(f[2]) / tonumber(f[7]) end
    if flow.skipped > lookahead then drop(flow) end
  end
end

local function step()
  local flow, class_start = next_flow()
  if not flow then return false end
  local id, tenant = next_in(flow)
  local overdue = flow.oldest and flow.passed >= max_passed_over and not flow.gone[flow.oldest]
  if overdue then id = flow.oldest end
  if not id then
    drop(flow)
    return true
  end
  flow.gone[id] = true
  local _, broken = guarded(id, engine, consider, flow, class_start, id, tenant, overdue)
  endings[#endings + 1] = broken
  if broken and id == flow.oldest then flow.oldest = redis.call('ZRANGE', pool .. 'queue:' .. flow.class, 0, 0)[1] end
  return true
end

if most_slots > 0 and redis.call('EXISTS', pool .. 'stats') == 1 then -- something waits, or did
  if not trial then try_suspect() end
  class_time = number_in('virtual_time', '*')
  for _, class in ipairs(classes) do
    if has_room(class) then open_flow(class) end
  end
  local opened = {unpack(flows)}
  while not closed and step() do end
  for _, flow in ipairs(opened) do
    if flow.taken > 0 then
      redis.call('HSET', pool .. 'virtual_time', flow.class, exact(flow.time), '*', exact(class_time),
        'passed/' .. flow.class, flow.passed)
      redis.call('HSET', pool .. 'finish_tags', '*/' .. flow.class, exact(flow.finish))
      redis.call('PEXPIRE', pool .. 'virtual_time', DAY)
      redis.call('PEXPIRE', pool .. 'finish_tags', DAY)
    end
  end
end

if #claimed > 0 then
  redis.call('PEXPIRE', owned, DAY)
  if number_in('drain', 'at') == 0 then note_drained() end -- a busy period begins
  left = left or num_queued() > 0 -- there is more: another idle engine may take it
end
if left then ring() end
if not alone then
  redis.call('HSET', pool .. 'rooms', engine, string.format('%d %d %d', held + num_taken,
    math.max(0, slots.batch - num_taken), math.max(0, blocks.batch - blocks_taken)))
end
if num_finished > 0 or #endings > 0 or #claimed > 0 then settle_if_idle() end
return {1, claimed, cancelled, endings, fenced}
