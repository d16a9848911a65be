-- RECORD_PAGE: records of one part in the order (created, id). ARGV: part, the id to begin behind ('': the first), the
-- id to end before ('': the last), how many, '1' for the newest first. Returns nil where an id is not known, else
-- {1 if there are more, id, body, version, created, id, …}.
local after, before, limit, descending = ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5] == '1'
sweep()
local rank, first, last = descending and 'ZREVRANK' or 'ZRANK', 0, redis.call('ZCARD', index) - 1
if after ~= '' then
  local at = redis.call(rank, index, after)
  if not at then return nil end
  first = at + 1
end
if before ~= '' then
  local at = redis.call(rank, index, before)
  if not at then return nil end
  last = at - 1
  if after == '' then first = math.max(first, last - limit + 1) end -- the page right before it
end
local page, count = {0}, 0
if before ~= '' and after == '' and first > 0 then page[1] = 1 end
while first <= last do
  local stop = math.min(last, first + limit)
  for _, id in ipairs(redis.call(descending and 'ZREVRANGE' or 'ZRANGE', index, first, stop)) do
    local f = redis.call('HMGET', kind .. 'entry:' .. name_of(id), 'body', 'version', 'created')
    if f[1] then -- else it has gone by itself, and the next sweep knows
      count = count + 1
      if count > limit then
        page[1] = 1
        return page
      end
      for _, field in ipairs({id, f[1], f[2], f[3]}) do page[#page + 1] = field end
    end
  end
  first = stop + 1
end
return page
