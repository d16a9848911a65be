-- CHANGE: one change of an organisation's directory, and its entry in the audit log, both or neither. KEYS[1] is the
-- organisation's prefix. ARGV: a name for the change (the same command once more, after a lost reply, changes nothing),
-- the version that must be there, the audit entry, entries that the log keeps; then field, value, … ('': take it away).
-- Returns the new version, or nil where another version is there.
local directory = KEYS[1] .. 'directory'
local f = redis.call('HMGET', directory, 'change', 'version')
if f[1] == ARGV[1] then return tonumber(f[2]) end
if (f[2] or '0') ~= ARGV[2] then return nil end
for i = 5, #ARGV, 2 do
  if ARGV[i + 1] == '' then
    redis.call('HDEL', directory, ARGV[i])
  else
    redis.call('HSET', directory, ARGV[i], ARGV[i + 1])
  end
end
redis.call('HSET', directory, 'change', ARGV[1])
redis.call('XADD', KEYS[1] .. 'audit', 'MAXLEN', '~', ARGV[4], '*', 'entry', ARGV[3])
return redis.call('HINCRBY', directory, 'version', 1)
