-- ENQUEUE: puts a request into its class's queue under its tenant's start tag. Idempotent by id.
-- Returns {'queued', depth} | {'known'} | {'full', depth}.
local id, body, class, tenant, gateway = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local cost, block_size, prompt, tokens = ARGV[6], ARGV[7], ARGV[8], tonumber(ARGV[9])
local weight, deadline = tonumber(ARGV[10]), ARGV[11]
local max_depth, max_bytes = tonumber(ARGV[12]), tonumber(ARGV[13])

local request = pool .. 'request:' .. id
if redis.call('EXISTS', request) == 1 then return {'known'} end
local depth = num_queued()
if depth >= max_depth or number_in('stats', 'bytes') + #body > max_bytes then return {'full', depth} end

-- Start-time fair queueing in tokens: S = max(V, F of the tenant), F = S + tokens / weight.
local tenant_field = class .. '/' .. tenant
local tag = math.max(number_in('virtual_time', class), number_in('finish_tags', tenant_field))
redis.call('HSET', pool .. 'finish_tags', tenant_field, exact(tag + tokens / weight))
redis.call('PEXPIRE', pool .. 'finish_tags', DAY)
redis.call('HSET', request, 'body', body, 'size', #body, 'class', class, 'tenant', tenant, 'gateway', gateway,
  'cost', cost, 'block_size', block_size, 'prompt', prompt, 'tokens', tokens, 'weight', ARGV[10],
  'deadline', deadline, 'tag', exact(tag), 'engine', '', 'epoch', 0, 'seq', 0, 'attempts', 0)
redis.call('PEXPIRE', request, DAY)
put_in_queue(id, class, exact(tag), deadline, #body, tokens)
ring()
return {'queued', depth + 1}
