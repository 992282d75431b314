-- One step of a ledger: what `decide` in step.py says, inside Redis.
-- All reads and checks come before the first write: a script that fails half way is not rolled back.
-- Figures are written with '%.0f': '..' and tostring give 1.2345678901234e+14 from $100,000 on.
--
-- KEYS  conf ('id', 'adopted', 'sequence', ceilings 'c:<kind>:<key>') | flags, the switches | the hold:
--       'o' or 'c' (closed), four figures, if open its expiry and particulars | for each window the hash
--       of its key: charged, spent, default ceiling, four figures each, and whether it warned
-- ARGV  verb ledger sequence, four figures, start end ttl tombstone owner windows, how many flags and
--       windows, flags, of each window: key, label, oldest label kept, four figures of its ceiling
local A, call, num, format, sub, SEP = ARGV, redis.call, tonumber, string.format, string.sub, '\31'
local taking, ledger, memo, nf, nw = A[1] == 'reserve', A[2], A[13], num(A[14]), num(A[15])
local ask = {num(A[4]), num(A[5]), num(A[6]), num(A[7])}

local function figures(text)
  local found = {}
  for figure in string.gmatch(text, '%d+') do found[#found + 1] = num(figure) end
  return found
end
local function join(list)
  return format(sub(string.rep('%.0f ', #list), 1, -2), unpack(list))
end

local at = format('%s.%06d', unpack(call('TIME')))
local now = num(at)
local names, rows, warn = {'id', 'adopted', 'sequence'}, {}, 0
for i = 1, nw do
  local a = 15 + nf + 7 * (i - 1)
  local kind = 'c:' .. sub(A[a + 2], 1, 2)
  names[2 + 2 * i], names[3 + 2 * i] = kind .. A[a + 1], kind
end
local conf = call('HMGET', KEYS[1], unpack(names))
local seq = num(conf[3] or 0)
local function answer(status, amount, detail, warn)
  return {status, join(amount or {0, 0, 0, 0}), detail or '', at, warn or 0, format('%.0f', seq)}
end
if ledger ~= '' and (conf[1] ~= ledger or seq < num(A[3])) then
  return answer('foreign', nil, (conf[1] or '') .. SEP .. (conf[2] or '0') .. SEP .. format('%.0f', seq))
end

local h = call('GET', KEYS[3])
local before, open = figures(string.match(h or '0 0 0 0', '[^\31]+')), h and sub(h, 1, 1) == 'o'
local counted = open and {0, 0, 0, 0} or before
if open and sub(h, -#memo - 1) ~= SEP .. memo then return answer('windows') end
local after, same = {}, h and not open
for d = 1, 4 do
  after[d] = taking and ask[d] or math.max(ask[d], counted[d])
  same = same and after[d] == counted[d]
end
if taking then
  if h then return answer(open and 'ok' or 'closed', before) end
  local set = call('HMGET', KEYS[2], unpack(A, 16, 15 + nf))
  for i = 1, nf do
    if set[i] then return answer('killed', nil, A[15 + i] .. SEP .. set[i]) end
  end
  if now < num(A[8]) or now >= num(A[9]) then return answer('clock') end
elseif same then
  return answer('ok', after)
end

for i = 1, nw do
  local a = 15 + nf + 7 * (i - 1)
  local got = call('HGET', KEYS[3 + i], A[a + 2])
  local row = figures(got or '0 0 0 0 0 0 0 0 0 0 0 0 0')
  row.fresh = not got
  if taking then
    local stored = conf[2 + 2 * i] or conf[3 + 2 * i]
    for d = 1, 4 do row[8 + d] = num(A[a + 3 + d]) end
    local limit = stored and figures(stored) or {unpack(row, 9, 12)}
    local near = false
    for d = 1, 4 do
      local used = row[d] + ask[d]
      if limit[d] > 0 and used > limit[d] then
        return answer('refused', nil, table.concat({i - 1, d - 1, format('%.0f', row[d]), format('%.0f', limit[d])}, SEP))
      end
      near = near or limit[d] > 0 and used * 5 >= limit[d] * 4
    end
    if near and row[13] == 0 then row[13], warn = 1, warn + 2 ^ (i - 1) end
  end
  rows[i] = row
end

for i = 1, nw do
  local a, row = 15 + nf + 7 * (i - 1), rows[i]
  for d = 1, 4 do
    -- A settlement whose window was pruned or lost begins it anew.
    row[d] = row[d] + after[d] - (row.fresh and 0 or before[d])
    if not taking then row[4 + d] = row[4 + d] + after[d] - (row.fresh and 0 or counted[d]) end
  end
  if row.fresh and taking then
    for _, label in ipairs(call('HKEYS', KEYS[3 + i])) do
      if sub(label, 1, 2) == sub(A[a + 2], 1, 2) and label < A[a + 3] then
        call('HDEL', KEYS[3 + i], label)
      end
    end
  end
  call('HSET', KEYS[3 + i], A[a + 2], join(row))
  if row.fresh then call('EXPIRE', KEYS[3 + i], 400 * 86400) end
end
if taking then
  local facts = {'o ' .. join(after), format('%.3f', now + A[10]), at, A[12], memo}
  call('SET', KEYS[3], table.concat(facts, SEP))
else
  call('SET', KEYS[3], 'c ' .. join(after), 'EX', A[11])
end
seq = call('HINCRBY', KEYS[1], 'sequence', 1)
return answer('ok', after, nil, warn)
