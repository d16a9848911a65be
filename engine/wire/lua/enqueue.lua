-- ENQUEUE: puts a request into its class's queue, in its tenant's line. Idempotent by id.
-- Returns {'queued', depth} | {'known'} | {'full' or 'tenant_full', depth, tokens ahead, tokens drained per second}.
local id, body, class, tenant, gateway = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local cost, block_size, prompt, tokens = ARGV[6], ARGV[7], ARGV[8], tonumber(ARGV[9])
local weight, deadline, priority, logged = ARGV[10], ARGV[11], tonumber(ARGV[12]), ARGV[13]
local max_depth, max_bytes = tonumber(ARGV[14]), tonumber(ARGV[15])
local max_tenant_depth, max_tenant_bytes = tonumber(ARGV[16]), tonumber(ARGV[17])
local account, billed = ARGV[18], ARGV[19] -- whom the ledger names, '' for none; prompt tokens that it counts

local request = pool .. 'request:' .. id
if redis.call('EXISTS', request) == 1 then return {'known'} end
local depth, waiting = num_queued(), number_in('stats', 'tokens')
local drain = redis.call('HGET', pool .. 'drain', 'rate') or '0'
local mine = number_in('tenants', 'depth:' .. tenant)
if mine >= max_tenant_depth or number_in('tenants', 'bytes:' .. tenant) + #body > max_tenant_bytes then
  -- Its own tokens drain at its share; equal shares are taken, since the weights of all would have to be looked up.
  local sharers = math.max(1, redis.call('ZCARD', pool .. 'turns:' .. class))
  local ahead = math.min(waiting, number_in('tenants', 'tokens:' .. tenant) * sharers)
  return {'tenant_full', mine, exact(ahead), drain}
end
if depth >= max_depth or number_in('stats', 'bytes') + #body > max_bytes then
  return {'full', depth, exact(waiting), drain}
end

local arrival = redis.call('HINCRBY', pool .. 'virtual_time', 'arrivals', 1)
redis.call('PEXPIRE', pool .. 'virtual_time', DAY)
local place = exact(priority * 2 ^ 32 + arrival)
redis.call('HSET', request, 'body', body, 'size', #body, 'class', class, 'tenant', tenant, 'gateway', gateway,
  'cost', cost, 'block_size', block_size, 'prompt', prompt, 'tokens', tokens, 'weight', weight, 'deadline', deadline,
  'place', place, 'arrival', arrival, 'since', now, 'logged', logged, 'engine', '', 'epoch', 0, 'seq', 0, 'attempts', 0)
if account ~= '' then redis.call('HSET', request, 'account', account, 'billed', billed, 'accepted', now) end
redis.call('PEXPIRE', request, DAY)
local start = redis.call('ZSCORE', pool .. 'turns:' .. class, tenant)
if not start then
  start = math.max(number_in('virtual_time', class), number_in('finish_tags', class .. '/' .. tenant))
end
put_in_queue(id, class, tenant, place, arrival, tonumber(start))
set_deadline(id, deadline)
count(1, class, tenant, #body, tokens)
ring()
return {'queued', depth + 1}
