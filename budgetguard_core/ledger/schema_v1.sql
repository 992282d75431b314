-- The ledger in PostgreSQL, format 1. Functions have versioned names, so that two releases share a
-- data base, and do the same as `decide` in step.py. Keys and labels are compared byte by byte.
CREATE TABLE bg_windows(
  key text COLLATE "C", label text COLLATE "C",
  charged bigint[] NOT NULL, spent bigint[] NOT NULL,
  ceiling bigint[] NOT NULL, -- the default of who reserved last
  warned bool NOT NULL DEFAULT false,
  PRIMARY KEY(key, label)
) WITH (fillfactor = 20, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_scale_factor = 0);
CREATE TABLE bg_holds(
  id text COLLATE "C" PRIMARY KEY, owner text NOT NULL, amount bigint[] NOT NULL,
  closed bool NOT NULL, made float8 NOT NULL, expires float8 NOT NULL,
  windows text NOT NULL -- of each a line: its key, a tab, its label
) WITH (fillfactor = 50);
CREATE INDEX bg_holds_done ON bg_holds(expires) WHERE closed;
-- 'format', 'id', 'adopted'; 'f:' and a kill switch; 'c:<kind>:<key>' and the four figures of a ceiling.
CREATE TABLE bg_notes(name text COLLATE "C" PRIMARY KEY, text text NOT NULL);
-- A sequence, because a row would make all steps wait for each other.
CREATE SEQUENCE bg_sequence;

-- Raises BG004 where the ledger is not the one that the sender knows, or an earlier state of it.
CREATE FUNCTION bg_meet_v1(p_ledger text, p_sequence bigint) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
  number bigint := (SELECT last_value FROM bg_sequence);
  known text := (SELECT text FROM bg_notes WHERE name = 'id');
BEGIN
  IF p_ledger <> '' AND (known IS DISTINCT FROM p_ledger OR number < p_sequence) THEN
    RAISE EXCEPTION USING ERRCODE = 'BG004', MESSAGE = concat_ws(E'\x1f', coalesce(known, ''),
      coalesce((SELECT text FROM bg_notes WHERE name = 'adopted'), '0'), number);
  END IF;
END $$;

CREATE FUNCTION bg_plus_v1(a bigint[], b bigint[], less bigint[] DEFAULT '{0,0,0,0}')
  RETURNS bigint[] LANGUAGE sql IMMUTABLE AS $$
  SELECT ARRAY[a[1] + b[1] - less[1], a[2] + b[2] - less[2], a[3] + b[3] - less[3],
    a[4] + b[4] - less[4]]
$$;
-- The first dimension in which a ceiling is exceeded; 0 is none.
CREATE FUNCTION bg_over_v1(a bigint[], l bigint[]) RETURNS int LANGUAGE sql IMMUTABLE AS $$
  SELECT CASE WHEN l[1] > 0 AND a[1] > l[1] THEN 1 WHEN l[2] > 0 AND a[2] > l[2] THEN 2
    WHEN l[3] > 0 AND a[3] > l[3] THEN 3 WHEN l[4] > 0 AND a[4] > l[4] THEN 4 ELSE 0 END
$$;

-- The hot rows come last; their locks are held from there to the commit. An error undoes the whole
-- statement in the same trip.
CREATE FUNCTION bg_reserve_v1(
  p_id text, p_amount bigint[], p_windows text, p_ledger text, p_sequence bigint, p_owner text,
  p_ttl float8, p_flags text, p_oldest text, p_from float8, p_to float8, p_ceilings bigint[],
  OUT status text, OUT amount bigint[], OUT at float8, OUT warn int, OUT number bigint
) LANGUAGE plpgsql AS $$
DECLARE
  h bg_holds; r record; used bigint[]; told bool; fresh bool; place int; flag text;
BEGIN
  PERFORM bg_meet_v1(p_ledger, p_sequence);
  status := 'ok'; amount := p_amount; warn := 0; number := 0;
  at := extract(epoch FROM clock_timestamp());
  INSERT INTO bg_holds VALUES(p_id, p_owner, p_amount, false, at, at + p_ttl, p_windows)
    ON CONFLICT DO NOTHING;
  IF NOT FOUND THEN
    SELECT * INTO h FROM bg_holds x WHERE x.id = p_id;
    status := CASE WHEN h.closed THEN 'closed' WHEN h.windows = p_windows THEN 'ok' ELSE 'windows' END;
    amount := CASE status WHEN 'windows' THEN '{0,0,0,0}' ELSE h.amount END;
    RETURN;
  END IF;
  SELECT substr(x.name, 3) || E'\x1f' || x.text INTO flag FROM bg_notes x
    WHERE x.name = ANY(string_to_array(p_flags, E'\x1f')) ORDER BY x.name LIMIT 1;
  IF FOUND THEN RAISE EXCEPTION USING ERRCODE = 'BG003', MESSAGE = flag; END IF;
  IF NOT (p_from <= at AND at < p_to) THEN
    RAISE EXCEPTION USING ERRCODE = 'BG002', MESSAGE = at::text;
  END IF;
  FOR r IN
    SELECT w.k, w.l, w.oldest, w.o::int, w.given,
      coalesce(string_to_array(coalesce(b.text, d.text), ' ')::bigint[], w.given) AS ceiling
    FROM (
      SELECT split_part(line, E'\t', 1) AS k, split_part(line, E'\t', 2) AS l, oldest, o,
        p_ceilings[4 * o - 3:4 * o] AS given
      FROM unnest(string_to_array(p_windows, E'\n'), string_to_array(p_oldest, E'\x1f'))
        WITH ORDINALITY u(line, oldest, o)
    ) w
    LEFT JOIN bg_notes b ON b.name = 'c:' || left(w.l, 2) || w.k
    LEFT JOIN bg_notes d ON d.name = 'c:' || left(w.l, 2)
    ORDER BY w.o
  LOOP
    place := bg_over_v1(p_amount, r.ceiling);
    IF place = 0 THEN
      -- Tests its condition on the newest version of the row, which it locks (READ COMMITTED).
      INSERT INTO bg_windows AS x VALUES(r.k, r.l, p_amount, '{0,0,0,0}', r.given)
        ON CONFLICT(key, label) DO UPDATE
          SET charged = bg_plus_v1(x.charged, p_amount), ceiling = r.given
          WHERE bg_over_v1(bg_plus_v1(x.charged, p_amount), r.ceiling) = 0
        RETURNING x.charged, x.warned, x.xmax = 0 INTO used, told, fresh;
    END IF;
    IF place > 0 OR NOT FOUND THEN
      used := coalesce((SELECT x.charged FROM bg_windows x WHERE x.key = r.k AND x.label = r.l),
        '{0,0,0,0}');
      place := bg_over_v1(bg_plus_v1(used, p_amount), r.ceiling);
      RAISE EXCEPTION USING ERRCODE = 'BG001',
        MESSAGE = concat_ws(E'\x1f', r.o - 1, place - 1, used[place], r.ceiling[place]);
    END IF;
    IF fresh THEN
      DELETE FROM bg_windows x WHERE x.key = r.k AND x.label >= left(r.l, 2) AND x.label < r.oldest;
    END IF;
    FOR i IN 1..4 LOOP
      CONTINUE WHEN told OR r.ceiling[i] = 0 OR used[i] < r.ceiling[i] - r.ceiling[i] / 5;
      warn := warn | (1 << (r.o - 1));
      UPDATE bg_windows x SET warned = true WHERE x.key = r.k AND x.label = r.l;
      EXIT;
    END LOOP;
  END LOOP;
  at := extract(epoch FROM clock_timestamp()); -- after the wait for the locks
  IF NOT (p_from <= at AND at < p_to) THEN
    RAISE EXCEPTION USING ERRCODE = 'BG002', MESSAGE = at::text;
  END IF;
  number := nextval('bg_sequence');
END $$;

CREATE FUNCTION bg_settle_v1(
  p_id text, p_amount bigint[], p_windows text, p_ledger text, p_sequence bigint, p_owner text,
  OUT status text, OUT amount bigint[], OUT at float8, OUT warn int, OUT number bigint
) LANGUAGE plpgsql AS $$
DECLARE
  zero bigint[] := '{0,0,0,0}'; before bigint[] := zero; counted bigint[] := zero;
  h bg_holds; line text;
BEGIN
  PERFORM bg_meet_v1(p_ledger, p_sequence);
  status := 'ok'; amount := p_amount; warn := 0; number := 0;
  at := extract(epoch FROM clock_timestamp());
  INSERT INTO bg_holds VALUES(p_id, p_owner, p_amount, true, at, at + 86400, p_windows)
    ON CONFLICT DO NOTHING;
  IF NOT FOUND THEN
    SELECT * INTO h FROM bg_holds x WHERE x.id = p_id FOR UPDATE;
    before := h.amount;
    IF h.closed THEN
      counted := before;
      amount := (SELECT array_agg(greatest(a, b)) FROM unnest(before, p_amount) u(a, b));
      IF amount = before THEN RETURN; END IF;
    ELSIF h.windows <> p_windows THEN
      status := 'windows'; amount := zero;
      RETURN;
    END IF;
    UPDATE bg_holds x SET amount = bg_settle_v1.amount, closed = true, expires = at + 86400
      WHERE x.id = p_id;
  END IF;
  FOREACH line IN ARRAY string_to_array(p_windows, E'\n') LOOP
    -- Where the window was pruned, or the store has lost it, the settlement begins it anew.
    INSERT INTO bg_windows AS x
      VALUES(split_part(line, E'\t', 1), split_part(line, E'\t', 2), amount, amount, zero)
      ON CONFLICT(key, label) DO UPDATE SET
        charged = bg_plus_v1(x.charged, amount, before),
        spent = bg_plus_v1(x.spent, amount, counted);
  END LOOP;
  number := nextval('bg_sequence');
END $$;
