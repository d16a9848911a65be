-- RECORD_CHUNK: appends one piece to a record's bytes. ARGV: part, id, how many pieces there are before it, the piece,
-- bytes of this kind at most. Returns 'kept', 'missing', 'gap' or 'full'.
local id, place, piece = ARGV[2], tonumber(ARGV[3]), ARGV[4]
local name = name_of(id)
local chunks = kind .. 'chunks:' .. name
sweep()
if redis.call('EXISTS', kind .. 'entry:' .. name) == 0 then return 'missing' end
local there = redis.call('LLEN', chunks)
if there > place then return 'kept' end -- the same command once more, after a lost reply
if there < place then return 'gap' end
if not fits(0, #piece, math.huge, tonumber(ARGV[5]), false) then return 'full' end
redis.call('RPUSH', chunks, piece)
redis.call('PEXPIREAT', chunks, redis.call('PEXPIRETIME', kind .. 'entry:' .. name))
set_size(name, size_of(name) + #piece)
return 'kept'
