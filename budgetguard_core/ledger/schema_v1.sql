-- The ledger in PostgreSQL, format 1. Functions have versioned names, so that two releases share a
-- data base. What a step means is said by `decide` in step.py; this says the same.
-- Keys and labels are compared byte by byte, whatever the data base's collation.

CREATE TABLE bg_windows(
  key text COLLATE "C", label text COLLATE "C",
  cu bigint NOT NULL DEFAULT 0, ct bigint NOT NULL DEFAULT 0,
  su bigint NOT NULL DEFAULT 0, st bigint NOT NULL DEFAULT 0,
  warned bool NOT NULL DEFAULT false,
  lu bigint NOT NULL DEFAULT 0, lt bigint NOT NULL DEFAULT 0,
  PRIMARY KEY(key, label)
) WITH (fillfactor = 20, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_scale_factor = 0);

CREATE TABLE bg_holds(
  id text COLLATE "C" PRIMARY KEY, root text COLLATE "C" NOT NULL,
  gu bigint NOT NULL, gt bigint NOT NULL, su bigint NOT NULL, st bigint NOT NULL,
  op int NOT NULL, closed bool NOT NULL,
  made timestamptz NOT NULL, expires timestamptz NOT NULL,
  lease bool NOT NULL, owner text NOT NULL,
  windows text NOT NULL -- keys joined by U+001F, U+001E, labels joined by U+001F
) WITH (fillfactor = 50);
CREATE INDEX bg_holds_leased ON bg_holds(root) WHERE NOT closed AND lease;
CREATE INDEX bg_holds_done ON bg_holds(expires) WHERE closed;

CREATE TABLE bg_ceilings(
  key text COLLATE "C", kind text COLLATE "C", usd bigint NOT NULL, tokens bigint NOT NULL,
  PRIMARY KEY(key, kind)
);
CREATE TABLE bg_notes(name text COLLATE "C" PRIMARY KEY, text text NOT NULL);

-- Windows that a new one makes too old to keep.
CREATE FUNCTION bg_forget_v1(p_key text, p_label text) RETURNS void LANGUAGE sql AS $$
  DELETE FROM bg_windows x WHERE x.key = p_key AND x.label COLLATE "C" >= left(p_label, 2)
    AND x.label COLLATE "C" < CASE left(p_label, 1)
      WHEN 'd' THEN 'd:' || to_char(to_date(substr(p_label, 3), 'YYYY-MM-DD') - 62, 'YYYY-MM-DD')
      ELSE 'm:' || to_char(to_date(substr(p_label, 3), 'YYYY-MM') - interval '13 months', 'YYYY-MM')
    END
$$;

-- The exact reservation. The hot rows come last; their locks are held from there to the commit.
-- An error undoes the whole statement in the same trip.
CREATE FUNCTION bg_reserve_v1(
  p_id text, n1 bigint, n2 bigint, p_ttl float8, p_flags text, p_keys text, p_labels text,
  p_from float8, p_to float8, p_lu bigint[], p_lt bigint[], p_ledger text, p_owner text,
  OUT status text, OUT gu bigint, OUT gt bigint, OUT detail text, OUT at float8, OUT warn int
) LANGUAGE plpgsql AS $$
DECLARE
  ks text[] := string_to_array(p_keys, E'\x1f');
  ls text[] := string_to_array(p_labels, E'\x1f');
  h bg_holds; r record; c1 bigint; c2 bigint; told bool; known text;
BEGIN
  status := 'ok'; detail := ''; warn := 0; gu := n1; gt := n2;
  IF p_ledger <> '' THEN
    SELECT x.text INTO known FROM bg_notes x WHERE x.name = 'id';
    IF known IS DISTINCT FROM p_ledger THEN
      RAISE EXCEPTION USING ERRCODE = 'BG004', MESSAGE = coalesce(known, '') || E'\x1f'
        || coalesce((SELECT x.text FROM bg_notes x WHERE x.name = 'adopted'), '');
    END IF;
  END IF;
  INSERT INTO bg_holds VALUES(p_id, ks[1], n1, n2, 0, 0, 1, false, clock_timestamp(),
    clock_timestamp() + make_interval(secs => p_ttl), false, p_owner,
    p_keys || E'\x1e' || p_labels) ON CONFLICT DO NOTHING;
  IF NOT FOUND THEN
    SELECT * INTO h FROM bg_holds x WHERE x.id = p_id;
    gu := h.gu; gt := h.gt; at := extract(epoch FROM clock_timestamp());
    IF h.closed THEN status := 'closed';
    ELSIF h.windows <> p_keys || E'\x1e' || p_labels THEN status := 'windows'; gu := 0; gt := 0;
    END IF;
    RETURN;
  END IF;
  SELECT substr(x.name, 3) || E'\x1f' || x.text INTO detail FROM bg_notes x
    WHERE x.name = ANY(string_to_array(p_flags, E'\x1f')) ORDER BY x.name LIMIT 1;
  IF FOUND THEN RAISE EXCEPTION USING ERRCODE = 'BG003', MESSAGE = detail; END IF;
  detail := '';
  at := extract(epoch FROM clock_timestamp());
  IF NOT (p_from <= at AND at < p_to) THEN
    RAISE EXCEPTION USING ERRCODE = 'BG002', MESSAGE = at::text;
  END IF;
  FOR r IN
    SELECT u.k, u.l, u.o, coalesce(b.usd, d.usd, u.lu) AS lu, coalesce(b.tokens, d.tokens, u.lt) AS lt
    FROM unnest(ks, ls, p_lu, p_lt) WITH ORDINALITY u(k, l, lu, lt, o)
    LEFT JOIN bg_ceilings b ON b.key = u.k AND b.kind = left(u.l, 1)
    LEFT JOIN bg_ceilings d ON d.key = '' AND d.kind = left(u.l, 1)
    ORDER BY u.o
  LOOP
    LOOP
      -- Tests its condition on the newest version of the row (READ COMMITTED).
      UPDATE bg_windows x SET cu = x.cu + n1, ct = x.ct + n2, lu = r.lu, lt = r.lt
        WHERE x.key = r.k AND x.label = r.l
        AND (r.lu = 0 OR x.cu + n1 <= r.lu) AND (r.lt = 0 OR x.ct + n2 <= r.lt)
        RETURNING x.cu, x.ct, x.warned INTO c1, c2, told;
      EXIT WHEN FOUND;
      SELECT x.cu, x.ct INTO c1, c2 FROM bg_windows x WHERE x.key = r.k AND x.label = r.l;
      IF FOUND AND (r.lu <> 0 AND c1 + n1 > r.lu OR r.lt <> 0 AND c2 + n2 > r.lt)
         OR NOT FOUND AND (r.lu <> 0 AND n1 > r.lu OR r.lt <> 0 AND n2 > r.lt) THEN
        c1 := coalesce(c1, 0); c2 := coalesce(c2, 0);
        IF r.lu <> 0 AND c1 + n1 > r.lu THEN
          detail := concat_ws(E'\x1f', r.o - 1, 0, c1, r.lu, 1);
        ELSE
          detail := concat_ws(E'\x1f', r.o - 1, 1, c2, r.lt, 1);
        END IF;
        RAISE EXCEPTION USING ERRCODE = 'BG001', MESSAGE = detail;
      END IF;
      INSERT INTO bg_windows(key, label) VALUES(r.k, r.l) ON CONFLICT DO NOTHING;
      PERFORM bg_forget_v1(r.k, r.l);
    END LOOP;
    -- 80 % as the stores that count beyond 63 bits have it: used * 5 >= ceiling * 4.
    IF NOT told AND (r.lu > 0 AND c1 >= r.lu - r.lu / 5 OR r.lt > 0 AND c2 >= r.lt - r.lt / 5) THEN
      warn := warn | (1 << (r.o - 1)::int);
      UPDATE bg_windows x SET warned = true WHERE x.key = r.k AND x.label = r.l;
    END IF;
  END LOOP;
  at := extract(epoch FROM clock_timestamp()); -- after the wait for the locks
  IF NOT (p_from <= at AND at < p_to) THEN
    RAISE EXCEPTION USING ERRCODE = 'BG002', MESSAGE = at::text;
  END IF;
END $$;

-- The settlement of an exact reservation; `unknown` where it is anything else.
CREATE FUNCTION bg_settle_v1(
  p_id text, s1 bigint, s2 bigint, p_keys text, p_labels text, p_ledger text,
  OUT status text, OUT warn int
) LANGUAGE plpgsql AS $$
DECLARE
  ks text[] := string_to_array(p_keys, E'\x1f');
  ls text[] := string_to_array(p_labels, E'\x1f');
  g1 bigint; g2 bigint;
BEGIN
  status := 'unknown'; warn := 0;
  IF p_ledger <> '' AND p_ledger IS DISTINCT FROM (SELECT x.text FROM bg_notes x WHERE x.name = 'id')
  THEN RETURN; END IF;
  UPDATE bg_holds SET su = s1, st = s2, gu = s1, gt = s2, op = 2, closed = true,
      expires = clock_timestamp() + interval '1 day'
    FROM (SELECT x.id AS i, x.gu AS u, x.gt AS t FROM bg_holds x WHERE x.id = p_id FOR UPDATE) o
    WHERE id = o.i AND op = 1 AND NOT closed AND su = 0 AND st = 0
      AND windows = p_keys || E'\x1e' || p_labels
    RETURNING o.u, o.t INTO g1, g2;
  IF NOT FOUND THEN RETURN; END IF;
  FOR i IN 1..cardinality(ks) LOOP
    UPDATE bg_windows x
      SET cu = x.cu + s1 - g1, ct = x.ct + s2 - g2, su = x.su + s1, st = x.st + s2
      WHERE x.key = ks[i] AND x.label = ls[i];
    CONTINUE WHEN s1 <= g1 AND s2 <= g2;
    -- It cost more than was reserved: the row is ours until the commit.
    UPDATE bg_windows x SET warned = true WHERE x.key = ks[i] AND x.label = ls[i] AND NOT x.warned
      AND (x.lu > 0 AND x.cu >= x.lu - x.lu / 5 OR x.lt > 0 AND x.ct >= x.lt - x.lt / 5);
    IF FOUND THEN warn := warn | (1 << (i - 1)); END IF;
  END LOOP;
  status := 'ok';
END $$;

-- A refusal leaves no trace: not the rows that were made to be locked either.
CREATE FUNCTION bg_unmake_v1(ks text[], ls text[], made int[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  FOR i IN 1..cardinality(made) LOOP
    DELETE FROM bg_windows x WHERE x.key = ks[made[i]] AND x.label = ls[made[i]];
  END LOOP;
END $$;

CREATE FUNCTION bg_step_v1(
  p_id text, p_op int, p_close bool, p_ttl float8, p_share int,
  s bigint[], k bigint[], n bigint[], w bigint[], p_flags text, p_keys text, p_labels text,
  p_from float8, p_to float8, p_lu bigint[], p_lt bigint[], p_ledger text, p_owner text,
  OUT status text, OUT gu bigint, OUT gt bigint, OUT detail text, OUT at float8, OUT warn int
) LANGUAGE plpgsql AS $$
DECLARE
  ks text[] := string_to_array(p_keys, E'\x1f');
  ls text[] := string_to_array(p_labels, E'\x1f');
  places int := cardinality(ks);
  h bg_holds; known bool; was bool := false; live int := 1; r record; found_rows int := 0;
  note text; l bigint; zero bigint[] := ARRAY[0,0];
  old bigint[] := zero; ns bigint[]; granted bigint[] := zero; charge bigint[];
  spent bigint[] := zero; more bigint[] := zero; added bigint[];
  used bigint[] := '{}'; lim bigint[] := '{}'; told bool[] := '{}'; before bigint[] := '{}'; stale bool := false;
  made int[] := '{}';
  takes bool := n[1] + n[2] + w[1] + w[2] > 0; taking bool;
  is_lease bool := NOT p_close AND (p_op > 1 OR w[1] > n[1] OR w[2] > n[2]);
BEGIN
  status := 'ok'; detail := ''; warn := 0; gu := 0; gt := 0;
  IF p_ledger <> '' THEN
    SELECT x.text INTO note FROM bg_notes x WHERE x.name = 'id';
    IF note IS DISTINCT FROM p_ledger THEN
      status := 'foreign';
      detail := coalesce(note, '') || E'\x1f'
        || coalesce((SELECT x.text FROM bg_notes x WHERE x.name = 'adopted'), '');
      at := extract(epoch FROM clock_timestamp());
      RETURN;
    END IF;
  END IF;
  -- Locks first, in one order for everyone; they also serialise two attempts at one hold. Every
  -- statement below sees what is committed by then (READ COMMITTED).
  FOR attempt IN 1..2 LOOP
    FOR r IN
      SELECT x.cu, x.ct, x.warned, x.lu AS last_lu, x.lt AS last_lt,
        coalesce(b.usd, d.usd, u.lu) AS lu, coalesce(b.tokens, d.tokens, u.lt) AS lt
      FROM unnest(ks, ls, p_lu, p_lt) WITH ORDINALITY u(uk, ul, lu, lt, i)
      JOIN bg_windows x ON x.key = u.uk AND x.label = u.ul
      LEFT JOIN bg_ceilings b ON b.key = u.uk AND b.kind = left(u.ul, 1)
      LEFT JOIN bg_ceilings d ON d.key = '' AND d.kind = left(u.ul, 1)
      ORDER BY u.i FOR UPDATE OF x
    LOOP
      found_rows := found_rows + 1;
      used := used || r.cu || r.ct; lim := lim || r.lu || r.lt; told := told || r.warned;
      before := before || r.last_lu || r.last_lt;
    END LOOP;
    EXIT WHEN found_rows = places;
    FOR i IN 1..places LOOP
      INSERT INTO bg_windows(key, label) VALUES(ks[i], ls[i]) ON CONFLICT DO NOTHING;
      CONTINUE WHEN NOT FOUND;
      made := made || i;
      -- A client's clock may be years ahead: only what has begun makes others old.
      IF p_from > 0 AND p_from <= extract(epoch FROM clock_timestamp()) THEN
        PERFORM bg_forget_v1(ks[i], ls[i]);
      END IF;
    END LOOP;
    found_rows := 0; used := '{}'; lim := '{}'; told := '{}'; before := '{}';
  END LOOP;
  at := extract(epoch FROM clock_timestamp()); -- after the wait; now() is the transaction's start
  SELECT * INTO h FROM bg_holds x WHERE x.id = p_id;
  known := FOUND;
  IF known THEN
    was := h.closed; spent := ARRAY[h.su, h.st]; stale := p_op <= h.op;
    IF NOT was AND h.windows <> p_keys || E'\x1e' || p_labels THEN
      status := 'windows';
    END IF;
    old := CASE WHEN was THEN spent ELSE ARRAY[greatest(h.gu, h.su), greatest(h.gt, h.st)] END;
  END IF;
  IF status = 'windows' THEN
    PERFORM bg_unmake_v1(ks, ls, made);
    RETURN;
  END IF;
  ns := ARRAY[greatest(spent[1], s[1]), greatest(spent[2], s[2])];
  IF stale THEN
    IF was AND NOT p_close THEN status := 'closed'; END IF;
    IF ns = spent THEN gu := h.gu; gt := h.gt; RETURN; END IF;
  END IF;
  taking := takes AND NOT stale;
  IF was OR p_close AND NOT stale THEN granted := ns;
  ELSIF stale THEN granted := ARRAY[h.gu, h.gt];
  ELSIF known THEN granted := k;
  END IF;
  charge := ARRAY[greatest(granted[1], ns[1]), greatest(granted[2], ns[2])];
  IF taking THEN
    SELECT substr(x.name, 3) || E'\x1f' || x.text INTO note FROM bg_notes x
      WHERE x.name = ANY(string_to_array(p_flags, E'\x1f')) ORDER BY x.name LIMIT 1;
    IF was OR p_close THEN status := 'closed';
    ELSIF FOUND THEN status := 'killed'; detail := note;
    ELSIF NOT (p_from <= at AND at < p_to) THEN status := 'clock';
    ELSE
      IF is_lease THEN
        SELECT count(*) + 1 INTO live FROM bg_holds x WHERE x.root = ks[1] AND NOT x.closed
          AND x.lease AND x.expires > clock_timestamp() AND x.id <> p_id;
      END IF;
      more := w;
      FOR i IN 1..places LOOP
        FOR d IN 1..2 LOOP
          CONTINUE WHEN lim[2*i-2+d] = 0 OR status <> 'ok';
          l := lim[2*i-2+d] - used[2*i-2+d] - (charge[d] - old[d]);
          IF l < n[d] THEN
            status := 'refused';
            detail := concat_ws(E'\x1f', i - 1, d - 1, used[2*i-2+d] + charge[d] - old[d],
              lim[2*i-2+d], live);
          END IF;
          more[d] := least(more[d],
            greatest(n[d], floor(l::numeric / (p_share * live))::bigint), greatest(l, 0));
        END LOOP;
      END LOOP;
    END IF;
    IF status <> 'ok' THEN more := zero; END IF;
  END IF;
  IF NOT known AND status <> 'ok' THEN
    PERFORM bg_unmake_v1(ks, ls, made);
    RETURN;
  END IF;
  gu := granted[1] + more[1]; gt := granted[2] + more[2];
  added := ARRAY[greatest(charge[1], gu) - old[1], greatest(charge[2], gt) - old[2]];
  IF NOT taking THEN lim := before; END IF; -- a report: as money was last asked for
  FOR i IN 1..places LOOP
    IF NOT told[i] AND (lim[2*i-1] > 0 AND used[2*i-1] + added[1] >= lim[2*i-1] - lim[2*i-1] / 5
        OR lim[2*i] > 0 AND used[2*i] + added[2] >= lim[2*i] - lim[2*i] / 5) THEN
      warn := warn | (1 << (i - 1)); told[i] := true;
    END IF;
  END LOOP;
  FOR i IN 1..places LOOP
    UPDATE bg_windows x SET cu = x.cu + added[1], ct = x.ct + added[2],
        su = x.su + ns[1] - spent[1], st = x.st + ns[2] - spent[2], warned = told[i],
        lu = lim[2*i-1], lt = lim[2*i]
      WHERE x.key = ks[i] AND x.label = ls[i];
  END LOOP;
  IF known THEN
    UPDATE bg_holds SET gu = bg_step_v1.gu, gt = bg_step_v1.gt, su = ns[1], st = ns[2],
      op = greatest(p_op, h.op), closed = was OR p_close AND NOT stale,
      expires = clock_timestamp()
        + make_interval(secs => CASE WHEN was OR p_close AND NOT stale THEN 86400 ELSE p_ttl END),
      lease = lease OR is_lease WHERE id = p_id;
  ELSE
    INSERT INTO bg_holds VALUES(p_id, ks[1], gu, gt, ns[1], ns[2], p_op, p_close, clock_timestamp(),
      clock_timestamp() + make_interval(secs => CASE WHEN p_close THEN 86400 ELSE p_ttl END),
      is_lease, p_owner, p_keys || E'\x1e' || p_labels);
  END IF;
END $$;
