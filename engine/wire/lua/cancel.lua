-- CANCEL: a queued request ends at once, a running one is told to its engine, a finished one is no matter.
-- Returns {'queued', ending} | {'running'} | {'unknown'}.
local id = ARGV[1]
local request = pool .. 'request:' .. id
local engine = redis.call('HGET', request, 'engine')
if not engine then return {'unknown'} end
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
