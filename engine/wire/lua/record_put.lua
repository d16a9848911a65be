-- RECORD_PUT: writes one record. ARGV: part, id, body, created, milliseconds to live ('': as before), the version to
-- write, the version that must be there ('': whatever, '0': none), records and bytes of this kind at most, '1' where
-- the oldest make room. Returns 'kept', 'changed' (another version is there), 'missing' or 'full'.
local id, body, created, ttl, version, old = ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7]
local name = name_of(id)
local entry = kind .. 'entry:' .. name
sweep()
local known = redis.call('HGET', entry, 'version')
if known == version then return 'kept' end -- the same command once more, after a lost reply
if old == '0' and known then return 'changed' end
if old ~= '' and old ~= '0' and known ~= old then return known and 'changed' or 'missing' end
local size = #body + (known and size_of(name) - redis.call('HSTRLEN', entry, 'body') or 0)
local more = known and size - size_of(name) or size
if not fits(known and 0 or 1, more, tonumber(ARGV[8]), tonumber(ARGV[9]), ARGV[10] == '1', id) then return 'full' end
if known then created = redis.call('HGET', entry, 'created') end
redis.call('HSET', entry, 'body', body, 'version', version, 'created', created)
redis.call('ZADD', index, created, id)
set_size(name, size)
if ttl ~= '' then live(name, tonumber(ttl)) end
return 'kept'
