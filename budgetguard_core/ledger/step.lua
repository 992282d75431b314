-- One step of a ledger: what `decide` in step.py says, inside Redis.
-- All reads and checks come before the first write: a script that fails half way is not rolled back.
-- Figures are written with '%.0f': '..' and tostring give 1.2345678901234e+14 from $100,000 on.
--
-- KEYS  conf | the hold | leases of the first key, by expiry | one hash for each key
--       conf has notes ('id', 'f:<flag>') and ceilings ('c:<key>:<kind>').
--       A key's hash has a field for each window: 'charged spent warned ceiling', dollars and tokens.
-- ARGV  id op close ttl share tombstone  spent keep need want (two figures each)  start end
--       number of flags, number of keys, ledger, owner, flags...
--       for each key: name, then for its day and its month: label, two ceilings, oldest label kept
local A, call, max, min = ARGV, redis.call, math.max, math.min
local SEP = '\31'
local op, asked, share = tonumber(A[2]), A[3] == '1', tonumber(A[5])
local S = {tonumber(A[7]), tonumber(A[8])}
local K = {tonumber(A[9]), tonumber(A[10])}
local N = {tonumber(A[11]), tonumber(A[12])}
local W = {tonumber(A[13]), tonumber(A[14])}
local nf, nk, known_as = tonumber(A[17]), tonumber(A[18]), A[19]
local first = 20 + nf
local takes = A[11] ~= '0' or A[12] ~= '0' or A[13] ~= '0' or A[14] ~= '0'
local leases = not asked and (op > 1 or W[1] > N[1] or W[2] > N[2])

local t = call('TIME')
local now, at = tonumber(t[1]) + tonumber(t[2]) / 1e6, t[1] .. '.' .. string.format('%06d', t[2])

local conf
if takes then
  local fields = {'id'}
  for i = 1, nf do fields[#fields + 1] = 'f:' .. A[20 + i] end
  fields[#fields + 1] = 'c::d'
  fields[#fields + 1] = 'c::m'
  for k = 0, nk - 1 do
    local name = A[first + k * 9 + 1]
    fields[#fields + 1] = 'c:' .. name .. ':d'
    fields[#fields + 1] = 'c:' .. name .. ':m'
  end
  conf = call('HMGET', KEYS[1], unpack(fields))
elseif known_as ~= '' then
  conf = call('HMGET', KEYS[1], 'id')
end
if known_as ~= '' and conf[1] ~= known_as then
  return {'foreign', 0, 0, (conf[1] or '') .. SEP .. (call('HGET', KEYS[1], 'adopted') or ''), at, 0}
end

local windows = {}
for k = 0, nk - 1 do
  local a = first + k * 9
  windows[k + 1] = A[a + 1] .. ' ' .. A[a + 2] .. ' ' .. A[a + 6]
end
windows = table.concat(windows, ' ')

local h = call('GET', KEYS[2])
local g, sp, was_closed, last, lease, memo = {0, 0}, {0, 0}, false, 0, false, nil
if h then
  local a, b, c, d, o, z, l, rest =
    string.match(h, '^(%d+) (%d+) (%d+) (%d+) (%d+) (%d) (%d)(.*)$')
  g, sp = {tonumber(a), tonumber(b)}, {tonumber(c), tonumber(d)}
  last, was_closed, lease = tonumber(o), z == '1', l == '1'
  if not was_closed then
    local place = string.find(rest, SEP, 1, true)
    memo = string.sub(rest, place)
    if string.sub(memo, -#windows - 1) ~= SEP .. windows then return {'windows', 0, 0, '', at, 0} end
  end
end
local stale = h and op <= last
local ns = {max(sp[1], S[1]), max(sp[2], S[2])}
local status = (stale and was_closed and not asked) and 'closed' or 'ok'
if stale and ns[1] == sp[1] and ns[2] == sp[2] then return {status, g[1], g[2], '', at, 0} end
local closing, taking = asked and not stale, takes and not stale

local old, granted, charge = {}, {}, {}
for d = 1, 2 do
  old[d] = was_closed and sp[d] or max(g[d], sp[d])
  if was_closed or closing then granted[d] = ns[d]
  elseif stale then granted[d] = g[d]
  else granted[d] = h and K[d] or 0 end
  charge[d] = max(granted[d], ns[d])
end

local detail, more, live = '', {0, 0}, 1
if taking then
  if was_closed or asked then status = 'closed' end
  for i = 1, nf do
    if status == 'ok' and conf[1 + i] then
      status, detail = 'killed', A[20 + i] .. SEP .. conf[1 + i]
    end
  end
  if status == 'ok' and not (tonumber(A[15]) <= now and now < tonumber(A[16])) then status = 'clock' end
  if status == 'ok' then
    more = {W[1], W[2]}
    if leases then
      live = call('ZCOUNT', KEYS[3], '(' .. at, '+inf') + 1
      local own = call('ZSCORE', KEYS[3], A[1])
      if own and tonumber(own) > now then live = live - 1 end
    end
  end
end

local rows, n = {}, 0
for k = 0, nk - 1 do
  local a = first + k * 9
  local got = call('HMGET', KEYS[4 + k], A[a + 2], A[a + 6])
  for j = 0, 1 do
    n = n + 1
    local row = {0, 0, 0, 0, 0, 0, 0, fresh = not got[1 + j]}
    if got[1 + j] then
      local i = 0
      for figure in string.gmatch(got[1 + j], '-?%d+') do i = i + 1; row[i] = tonumber(figure) end
    end
    rows[n] = row
    if taking then
      local limit = {tonumber(A[a + 3 + 4 * j]), tonumber(A[a + 4 + 4 * j])}
      local stored = conf[1 + nf + 2 + n] or conf[1 + nf + 1 + j]
      if stored then
        local p, q = string.match(stored, '^(%d+) (%d+)$')
        limit = {tonumber(p), tonumber(q)}
      end
      row.limit = limit
      if status == 'ok' then
        for d = 1, 2 do
          if limit[d] > 0 and status == 'ok' then
            local left = limit[d] - row[d] - (charge[d] - old[d])
            if left < N[d] then
              status = 'refused'
              detail = table.concat({n - 1, d - 1, string.format('%.0f', row[d]),
                string.format('%.0f', limit[d]), live}, SEP)
            end
            more[d] = min(more[d], max(N[d], math.floor(left / (share * live))), max(left, 0))
          end
        end
      end
    end
  end
end
if status ~= 'ok' then more = {0, 0} end
if not h and status ~= 'ok' then return {status, 0, 0, detail, at, 0} end

local change = {}
for d = 1, 2 do
  granted[d] = granted[d] + more[d]
  change[d] = max(charge[d], granted[d]) - old[d]
  change[d + 2] = ns[d] - sp[d]
end
local warn = 0
for i = 1, n do
  local row = rows[i]
  if taking then
    local reached = false
    for d = 1, 2 do
      local l = row.limit[d]
      if l > 0 and row[5] == 0 and (row[d] + change[d]) * 5 >= l * 4 then reached = true end
    end
    if reached then warn = warn + 2 ^ (i - 1); row[5] = 1 end
    row[6], row[7] = row.limit[1], row.limit[2]
  end
end

for k = 0, nk - 1 do
  local a, out = first + k * 9, {}
  for j = 0, 1 do
    local row = rows[2 * k + j + 1]
    out[j + 1] = string.format('%.0f %.0f %.0f %.0f %d %.0f %.0f', row[1] + change[1],
      row[2] + change[2], row[3] + change[3], row[4] + change[4], row[5], row[6], row[7])
    if row.fresh then
      local kind, oldest = string.sub(A[a + 2 + 4 * j], 1, 2), A[a + 5 + 4 * j]
      for _, label in ipairs(call('HKEYS', KEYS[4 + k])) do
        if string.sub(label, 1, 2) == kind and label < oldest then call('HDEL', KEYS[4 + k], label) end
      end
    end
  end
  call('HSET', KEYS[4 + k], A[a + 2], out[1], A[a + 6], out[2])
  if rows[2 * k + 1].fresh then call('EXPIRE', KEYS[4 + k], 400 * 86400) end
end

lease = lease or leases
local closed = was_closed or closing
local text = string.format('%.0f %.0f %.0f %.0f %d %d %d', granted[1], granted[2], ns[1], ns[2],
  max(op, last), closed and 1 or 0, lease and 1 or 0)
if closed then
  call('SET', KEYS[2], text, 'EX', A[6])
  if lease then call('ZREM', KEYS[3], A[1]) end
else
  local expires = string.format('%.3f', now + tonumber(A[4]))
  memo = memo or (SEP .. at .. SEP .. A[20] .. SEP .. windows)
  call('SET', KEYS[2], text .. ' ' .. expires .. memo)
  if lease then call('ZADD', KEYS[3], expires, A[1]) end
end
return {status, granted[1], granted[2], detail, at, warn}
