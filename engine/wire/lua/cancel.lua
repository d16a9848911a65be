-- CANCEL: a queued request ends at once, a running one is told to its engine, a finished one is no matter.
-- ARGV: id, output tokens that its client has had ('': all that there are), and for the ledger why it ends ('':
-- cancelled). Returns {'queued', ending} | {'running'} | {'unknown'}.
local id, counted, why = ARGV[1], ARGV[2], ARGV[3]
local request = pool .. 'request:' .. id
local engine = redis.call('HGET', request, 'engine')
if not engine then return {'unknown'} end
if counted ~= '' then redis.call('HSET', request, 'counted', counted) end
if why ~= '' then redis.call('HSET', request, 'why', why) end
if engine == '' then
  local last = end_queued(id, 'cancelled')
  settle_if_idle()
  return {'queued', last}
end
-- The mark survives the engine: whoever takes the request from it ends it instead of running it again.
if redis.call('HSETNX', request, 'cancel', 1) == 1 then
  redis.call('RPUSH', pool .. 'cancel:' .. engine, id)
  redis.call('PEXPIRE', pool .. 'cancel:' .. engine, DAY)
  ring()
end
return {'running'}
