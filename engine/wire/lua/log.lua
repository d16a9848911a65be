-- LOG: one request's own stream, in a slot of its own. KEYS[1] is the stream; ARGV: packed frames ('': open it, unless
-- it is there), milliseconds that it lives from now on ('': as long as before). Returns 1 when it was opened now, the
-- entry's id when one was added, else 0 or nil. No prelude.
if ARGV[1] == '' then
  if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
  redis.call('XADD', KEYS[1], '*', 'boot', '')
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  return 1
end
local added = redis.call('XADD', KEYS[1], 'NOMKSTREAM', '*', 'f', ARGV[1])
if added and ARGV[2] ~= '' then redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
return added
