-- One step of a ledger: what `decide` in step.py says, inside Redis.
-- All reads and checks come before the first write: a script that fails half way is not rolled back.
-- Figures are written with '%.0f': '..' and tostring give 1.2345678901234e+14 from $100,000 on.
--
-- KEYS  conf | the hold | leases of the first key, by expiry | one hash for each key
--       conf has notes ('id', 'f:<flag>') and ceilings ('c:<key>:<kind>').
--       A key's hash has a field for each window: 'charged spent warned ceiling', dollars and tokens.
-- ARGV  id op close ttl share tombstone  spent keep need want (two figures each)  start end
--       number of flags, number of keys, ledger, owner, names and labels joined, flags...
--       for each key: name, then for its day and its month: label, two ceilings, oldest label kept
local A, call, max, min, floor = ARGV, redis.call, math.max, math.min, math.floor
local format, match, num = string.format, string.match, tonumber
local SEP = '\31'
local FIGURES = '^(-?%d+) (-?%d+) (-?%d+) (-?%d+) (%d) (%d+) (%d+)$'
local op, asked = num(A[2]), A[3] == '1'
local s1, s2, n1, n2, w1, w2 = num(A[7]), num(A[8]), num(A[11]), num(A[12]), num(A[13]), num(A[14])
local nf, nk, known_as, memo = num(A[17]), num(A[18]), A[19], A[21]
local first = 21 + nf
local takes = n1 > 0 or n2 > 0 or w1 > 0 or w2 > 0
local leases = not asked and (op > 1 or w1 > n1 or w2 > n2)

local t = call('TIME')
local now, at = t[1] + t[2] / 1e6, t[1] .. '.' .. format('%06d', t[2])

local conf
if takes then
  local fields = {'id', 'c::d', 'c::m'}
  for i = 1, nf do fields[3 + i] = 'f:' .. A[21 + i] end
  for k = 0, nk - 1 do
    local name, place = 'c:' .. A[first + k * 9 + 1], 4 + nf + 2 * k
    fields[place], fields[place + 1] = name .. ':d', name .. ':m'
  end
  conf = call('HMGET', KEYS[1], unpack(fields))
elseif known_as ~= '' then
  conf = {call('HGET', KEYS[1], 'id')}
end
if known_as ~= '' and conf[1] ~= known_as then
  return {'foreign', 0, 0, (conf[1] or '') .. SEP .. (call('HGET', KEYS[1], 'adopted') or ''), at, 0}
end

local h = call('GET', KEYS[2])
local g1, g2, sp1, sp2, was_closed, last, lease, rest = 0, 0, 0, 0, false, 0, false, nil
if h then
  local a, b, c, d, o, z, l
  a, b, c, d, o, z, l, rest = match(h, '^(%d+) (%d+) (%d+) (%d+) (%d+) (%d) (%d)(.*)$')
  g1, g2, sp1, sp2 = num(a), num(b), num(c), num(d)
  last, was_closed, lease = num(o), z == '1', l == '1'
  if not was_closed then
    rest = string.sub(rest, (string.find(rest, SEP, 1, true)))
    if string.sub(rest, -#memo - 1) ~= SEP .. memo then return {'windows', 0, 0, '', at, 0} end
  end
end
local stale = h and op <= last
local ns1, ns2 = max(sp1, s1), max(sp2, s2)
local status = (stale and was_closed and not asked) and 'closed' or 'ok'
if stale and ns1 == sp1 and ns2 == sp2 then return {status, g1, g2, '', at, 0} end
local closing, taking = asked and not stale, takes and not stale

local old1, old2, granted1, granted2 = sp1, sp2, 0, 0
if not was_closed then old1, old2 = max(g1, sp1), max(g2, sp2) end
if was_closed or closing then granted1, granted2 = ns1, ns2
elseif stale then granted1, granted2 = g1, g2
elseif h then granted1, granted2 = num(A[9]), num(A[10]) end
local charge1, charge2 = max(granted1, ns1), max(granted2, ns2)

local detail, more1, more2, live = '', 0, 0, 1
if taking then
  if was_closed or asked then status = 'closed' end
  for i = 1, nf do
    if status == 'ok' and conf[3 + i] then
      status, detail = 'killed', A[21 + i] .. SEP .. conf[3 + i]
    end
  end
  if status == 'ok' and not (num(A[15]) <= now and now < num(A[16])) then status = 'clock' end
  if status == 'ok' then
    more1, more2 = w1, w2
    if leases then
      live = call('ZCOUNT', KEYS[3], '(' .. at, '+inf') + 1
      local own = call('ZSCORE', KEYS[3], A[1])
      if own and num(own) > now then live = live - 1 end
    end
  end
end

-- What a window leaves to this step in one dimension.
local parts = A[5] * live
local function grant(more, used, limit, need, place, dimension)
  if limit == 0 or status ~= 'ok' then return more end
  local left = limit - used
  if left < need then
    status = 'refused'
    detail = table.concat({place, dimension, format('%.0f', used), format('%.0f', limit), live}, SEP)
  end
  return min(more, max(need, floor(left / parts)), max(left, 0))
end

local rows, n = {}, 0
for k = 0, nk - 1 do
  local a = first + k * 9
  local got = call('HMGET', KEYS[4 + k], A[a + 2], A[a + 6])
  for j = 0, 1 do
    n = n + 1
    local row = {0, 0, 0, 0, '0', '0', '0', fresh = true}
    if got[1 + j] then
      row = {match(got[1 + j], FIGURES)}
      row[1], row[2] = num(row[1]), num(row[2])
    end
    rows[n] = row
    if taking then
      local one, two = A[a + 3 + 4 * j], A[a + 4 + 4 * j]
      local stored = conf[3 + nf + n] or conf[2 + j]
      if stored then one, two = match(stored, '^(%d+) (%d+)$') end
      row[6], row[7] = one, two
      more1 = grant(more1, row[1] + charge1 - old1, num(one), n1, n - 1, 0)
      more2 = grant(more2, row[2] + charge2 - old2, num(two), n2, n - 1, 1)
    end
  end
end
if status ~= 'ok' then more1, more2 = 0, 0 end
if not h and status ~= 'ok' then return {status, 0, 0, detail, at, 0} end

granted1, granted2 = granted1 + more1, granted2 + more2
local added1, added2 = max(charge1, granted1) - old1, max(charge2, granted2) - old2
local warn, n = 0, 0
for k = 0, nk - 1 do
  local a, out = first + k * 9, {}
  for j = 0, 1 do
    n = n + 1
    local row = rows[n]
    local u1, u2 = row[1] + added1, row[2] + added2
    if row[5] == '0' then
      -- Of a report: the ceilings that money was last asked for under.
      local l1, l2 = num(row[6]), num(row[7])
      if l1 > 0 and u1 * 5 >= l1 * 4 or l2 > 0 and u2 * 5 >= l2 * 4 then
        warn, row[5] = warn + 2 ^ (n - 1), '1'
      end
    end
    out[j + 1] = format('%.0f %.0f %.0f %.0f %s %s %s', u1, u2, row[3] + ns1 - sp1,
      row[4] + ns2 - sp2, row[5], row[6], row[7])
    -- A client's clock may be years ahead: only what has begun makes others old.
    if row.fresh and num(A[15]) <= now then
      local kind, oldest = string.sub(A[a + 2 + 4 * j], 1, 2), A[a + 5 + 4 * j]
      for _, label in ipairs(call('HKEYS', KEYS[4 + k])) do
        if string.sub(label, 1, 2) == kind and label < oldest then call('HDEL', KEYS[4 + k], label) end
      end
    end
  end
  call('HSET', KEYS[4 + k], A[a + 2], out[1], A[a + 6], out[2])
  if rows[n - 1].fresh then call('EXPIRE', KEYS[4 + k], 400 * 86400) end
end

lease = lease or leases
local closed = was_closed or closing
local text = format('%.0f %.0f %.0f %.0f %d %d %d', granted1, granted2, ns1, ns2, max(op, last),
  closed and 1 or 0, lease and 1 or 0)
if closed then
  call('SET', KEYS[2], text, 'EX', A[6])
  if lease then call('ZREM', KEYS[3], A[1]) end
else
  local expires = format('%.3f', now + A[4])
  call('SET', KEYS[2], text .. ' ' .. expires .. (rest or SEP .. at .. SEP .. A[20] .. SEP .. memo))
  if lease then call('ZADD', KEYS[3], expires, A[1]) end
end
return {status, granted1, granted2, detail, at, warn}
