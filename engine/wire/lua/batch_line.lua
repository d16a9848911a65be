-- BATCH_LINE: writes the one result of a line of a batch into a file and counts it. KEYS[1] is the prefix of the
-- tenant's files. ARGV: '', the file, prefix of the batch's own keys, the runner, the line's number, the result's bytes,
-- milliseconds that the batch's keys live, then counters and what to add to them. Returns 'kept', 'known' (the line has
-- its result already), 'lost' (another runner has the batch) or 'missing' (there is no such file).
-- Results are not refused for the room they take: the work is done, and who asked for it is told by the next upload.
local id, batch, runner, line, result = ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local name = name_of(id)
local chunks = kind .. 'chunks:' .. name
local JOIN = 65536 -- bytes: small results share a piece, so that reading them takes few steps
if redis.call('GET', batch .. 'lease') ~= runner then return 'lost' end
if redis.call('GETBIT', batch .. 'done', line) == 1 then return 'known' end
if redis.call('EXISTS', kind .. 'entry:' .. name) == 0 then return 'missing' end
local last = redis.call('LINDEX', chunks, -1)
if last and #last + #result <= JOIN then
  redis.call('LSET', chunks, -1, last .. result)
else
  redis.call('RPUSH', chunks, result)
end
redis.call('PEXPIREAT', chunks, redis.call('PEXPIRETIME', kind .. 'entry:' .. name))
set_size(name, size_of(name) + #result)
redis.call('SETBIT', batch .. 'done', line, 1)
for at = 8, #ARGV, 2 do redis.call('HINCRBY', batch .. 'counts', ARGV[at], ARGV[at + 1]) end
redis.call('HINCRBY', batch .. 'counts', 'bytes:' .. id, #result)
redis.call('PEXPIRE', batch .. 'done', ARGV[7])
redis.call('PEXPIRE', batch .. 'counts', ARGV[7])
return 'kept'
