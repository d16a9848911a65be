-- RECORD_TOUCH: the records of one part with the ids ARGV[3...], or all of them, live ARGV[2] milliseconds more at least.
local ids = {unpack(ARGV, 3)}
sweep()
if #ids == 0 then ids = redis.call('ZRANGE', index, 0, -1) end
for _, id in ipairs(ids) do
  if redis.call('ZSCORE', index, id) then live(name_of(id), tonumber(ARGV[2])) end
end
return #ids
