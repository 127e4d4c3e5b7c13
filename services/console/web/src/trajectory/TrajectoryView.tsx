import { Anchor, Badge, Button, Code, CopyButton, Group, NativeSelect, Text } from "@mantine/core";
import { useCallback, useDeferredValue, useEffect, useMemo, useRef, useState } from "react";
import { Link, useSearchParams } from "react-router";
import { api } from "../api/client";
import { paths } from "../app/paths";
import { ExternalLink } from "../ui/ExternalLink";
import { formatNumber, UNKNOWN } from "../ui/format";
import { useHotkeys } from "../ui/hotkeys";
import { EmptyState } from "../ui/states";
import { asFlag, asNumber, asOneOf, asText, useSearchParam } from "../ui/searchParams";
import { Legend, ModePicker } from "./ColourBar";
import { colourTokens, DEFAULT_MODE, findMode, fitScale, isAvailable, MODE_IDS, MODES, type ModeId } from "./colours";
import { Conversation, type ConversationHandle } from "./Conversation";
import { explainAdvantage, type Credit } from "./credit";
import { FindBar } from "./FindBar";
import { findInRows } from "./find";
import { createGoldFinder } from "./gold";
import { GroupStrip } from "./GroupStrip";
import { Judgements } from "./Judgements";
import { layOut, listTokens, type Detail, type Row } from "./layout";
import { Replay } from "./Replay";
import { Timings } from "./Timings";
import { TokenPanel } from "./TokenPanel";
import { TurnHead } from "./TurnHead";
import "./trajectory.css";

const asMode = asOneOf(MODE_IDS);
const MANY = 500;

/** One trajectory: what was said, why it was rewarded so, and what each token went through. */
export function TrajectoryView({ run, detail }: { run: string; detail: Detail }) {
  const { summary, tokens, step_version: stepVersion } = detail;
  const [wantedMode, setMode] = useSearchParam<ModeId>("colour", asMode, DEFAULT_MODE);
  const mode = isAvailable(findMode(wantedMode), tokens, stepVersion) ? wantedMode : DEFAULT_MODE;
  const [showsPassages, setShowsPassages] = useSearchParam("observations", asFlag, true);
  const [find, setFind] = useSearchParam("find", asText, "");
  const [pinned, setPinned] = usePinned();
  const [pointed, setPointed] = useState<number | null>(null);
  const view = useRef<ConversationHandle>(null);

  const rows = useMemo(() => layOut(detail, showsPassages), [detail, showsPassages]);
  const findGold = useMemo(() => createGoldFinder(summary.targets), [summary.targets]);
  const wanted = useDeferredValue(find);
  const found = useMemo(() => findInRows(rows, wanted), [rows, wanted]);
  const { scale, colours } = useMemo(() => {
    const { kind, read } = findMode(mode);
    const values = tokens === null ? null : read(tokens, stepVersion);
    const fitted = fitScale(kind, values === null ? [] : [values]);
    return { scale: fitted, colours: colourTokens(fitted, values) };
  }, [mode, tokens, stepVersion]);

  const group = api.useQuery(
    "get",
    "/api/runs/{run}/trajectories",
    {
      params: {
        path: { run },
        query: { place: summary.place, uid: summary.uid, order: "ascending" as const, limit: MANY },
      },
    },
    { enabled: detail.group.length > 1 },
  );
  const samples = useMemo(() => (group.data?.rows ?? []).toSorted((a, b) => a.sample - b.sample), [group.data]);
  const credit = useMemo<Credit>(() => {
    const counted = samples.filter(({ trained, status }) => trained !== false && status === "OK");
    return {
      estimator: detail.estimator,
      rewards: counted.flatMap(({ reward }) => (reward === null ? [] : [reward])),
      reward: summary.reward,
      baseline: detail.baseline,
      deviation: detail.deviation,
      trained: summary.trained,
      reason: summary.reason,
    };
  }, [samples, detail, summary]);

  // A link to a token leads to it.
  const linked = useRef(pinned);
  useEffect(() => {
    if (linked.current >= 0) view.current?.showToken(linked.current, true);
  }, []);

  const hasToken = tokens !== null && pinned >= 0 && pinned < tokens.text.length;
  const shown = hasToken ? pinned : pointed;
  const pin = (token: number | null, scroll: boolean) => {
    setPinned(token ?? -1);
    view.current?.showToken(token, scroll);
  };
  const onToken = useCallback(
    (token: number | null, isPressed: boolean) => {
      if (isPressed) setPinned(token ?? -1);
      else setPointed(token);
      if (isPressed) view.current?.showToken(token);
    },
    [setPinned],
  );
  // Observations that are shown as passages have tokens that are not in sight.
  const walk = (by: number) => {
    if (tokens === null) return;
    const inSight = listTokens(rows);
    let next = (shown ?? (by > 0 ? -1 : tokens.text.length)) + by;
    while (next >= 0 && next < tokens.text.length && !inSight.has(next)) next += by;
    if (inSight.has(next)) pin(next, true);
  };
  const goToStrongest = () => {
    const inSight = listTokens(rows);
    const values = tokens === null ? null : findMode(mode).read(tokens, stepVersion);
    const next = findNextStrongest(values?.map((value, token) => (inSight.has(token) ? value : null)) ?? null, shown);
    if (next !== null) pin(next, true);
  };
  useHotkeys(
    [
      {
        keys: "l",
        label: "Next token",
        run: () => {
          walk(1);
        },
      },
      {
        keys: "h",
        label: "Previous token",
        run: () => {
          walk(-1);
        },
      },
      { keys: "e", label: "Token with the strongest colour, then the next strongest", run: goToStrongest },
      {
        keys: "Escape",
        label: "Let go of the token",
        run: () => {
          pin(null, false);
        },
      },
    ],
    tokens !== null,
  );
  useHotkeys([
    {
      keys: "o",
      label: "Observations as passages, or as the policy read them",
      run: () => {
        setShowsPassages(!showsPassages);
      },
    },
  ]);

  const renderHead = useCallback(
    (row: Row & { kind: "head" }) => (
      <TurnHead
        row={row}
        credit={credit}
        value={meanOfTurn(detail, row.block.turn)}
        showsPassages={showsPassages}
        onShowPassages={setShowsPassages}
      />
    ),
    [credit, detail, showsPassages, setShowsPassages],
  );

  return (
    <div className="trajectory">
      <Summary run={run} detail={detail} />
      <div className="toolbar">
        <div className="wide">
          <ModePicker mode={mode} tokens={tokens} stepVersion={stepVersion} onMode={setMode} />
        </div>
        <Group justify="space-between" gap="xs">
          <NativeSelect
            className="narrow"
            size="xs"
            aria-label="Colour by"
            value={mode}
            data={MODES.map((one) => ({
              value: one.id,
              label: one.label,
              disabled: !isAvailable(one, tokens, stepVersion),
            }))}
            onChange={(event) => {
              setMode(asMode.read(event.currentTarget.value) ?? DEFAULT_MODE);
            }}
          />
          <Legend mode={mode} scale={scale} />
          <FindBar
            find={find}
            onFind={setFind}
            count={found.matches.length}
            onGo={(match) => {
              const row = found.matches[match]?.row;
              if (row !== undefined) view.current?.showRow(row);
            }}
          />
        </Group>
      </div>
      <div className="sides">
        <div>
          {rows.every(({ kind }) => kind === "prompt") && (
            <EmptyState title="The policy wrote nothing">{summary.reason ?? summary.status}</EmptyState>
          )}
          <Conversation
            ref={view}
            rows={rows}
            colours={colours}
            isColoured={mode !== "author"}
            found={found}
            wanted={wanted}
            findGold={findGold}
            renderHead={renderHead}
            onToken={onToken}
          />
        </div>
        <aside className="side" aria-label="About this trajectory">
          {tokens !== null && (
            <TokenPanel
              tokens={tokens}
              token={shown}
              stepVersion={stepVersion}
              isPinned={hasToken}
              onClose={() => {
                pin(null, false);
              }}
            />
          )}
          <section className="why" aria-label="Why" data-testid="why">
            <h2>Why</h2>
            <p className="hint">{explainWhole(detail, credit)}</p>
            <GroupStrip run={run} place={summary.place} uid={summary.uid} row={summary.row} samples={samples} />
          </section>
          <Judgements
            run={run}
            place={summary.place}
            row={summary.row}
            judgement={detail.judgement}
            validation={detail.validation}
          />
          {detail.timings !== null && <Timings timings={detail.timings} />}
          <Origin run={run} detail={detail} />
          {/* Of a validation neither prompt nor seed is kept. */}
          {detail.replay !== "" && <Replay run={run} detail={detail} />}
        </aside>
      </div>
    </div>
  );
}

const WRITE_MS = 300;

/** The token that was chosen, -1 for none. It is in the address after a pause: browsers limit how often that changes. */
function usePinned(): [number, (token: number) => void] {
  const [written, write] = useSearchParam<number>("token", asNumber, -1);
  const [pinned, setPinned] = useState(written);
  useEffect(() => {
    if (pinned === written) return undefined;
    const timer = setTimeout(() => {
      write(pinned);
    }, WRITE_MS);
    return () => {
      clearTimeout(timer);
    };
  }, [pinned, written, write]);
  return [pinned, setPinned];
}

function Summary({ run, detail }: { run: string; detail: Detail }) {
  const { summary } = detail;
  const isRight = summary.em === null ? null : summary.em > 0;
  return (
    <Group gap="xs" mb="xs" className="summary" data-testid="summary">
      {isRight !== null && (
        <Badge
          style={
            isRight
              ? { color: "var(--good)", background: "var(--good-shade)" }
              : { color: "var(--bad)", background: "var(--bad-shade)" }
          }
        >
          {isRight ? "right" : "wrong"}
        </Badge>
      )}
      <Text size="sm" style={{ overflowWrap: "anywhere" }}>
        {summary.answer === null ? "no answer" : <b>{summary.answer}</b>}
        <span className="quiet"> · accepted: {summary.targets.length > 0 ? summary.targets.join(" | ") : UNKNOWN}</span>
      </Text>
      <Text size="sm" className="number">
        reward {formatNumber(summary.reward)}
      </Text>
      {summary.status !== "OK" && (
        <Badge style={{ color: "var(--bad)", background: "var(--bad-shade)" }}>{summary.status}</Badge>
      )}
      {summary.reason !== null && (
        <Text size="sm" className="quiet">
          {summary.reason}
        </Text>
      )}
      {summary.truncated && <Badge style={{ color: "var(--warn)", background: "var(--warn-shade)" }}>truncated</Badge>}
      {!summary.finished && <Badge variant="default">without an answer</Badge>}
      {summary.trained === false && <Badge variant="default">not trained on</Badge>}
      <Text size="sm" className="quiet">
        {summary.step === null ? (
          summary.place
        ) : (
          <Anchor component={Link} to={paths.step(run, summary.step)} underline="always">
            step {summary.step}
          </Anchor>
        )}
        {` · sample ${summary.sample} · ${describeVersions(summary.versions)}`}
        {summary.tokens !== null && ` · ${formatNumber(summary.tokens)} tokens`}
        {` · ${summary.turns} turns, ${summary.searches} ${summary.searches === 1 ? "search" : "searches"}`}
      </Text>
    </Group>
  );
}

function Origin({ run, detail }: { run: string; detail: Detail }) {
  const { summary, trace_id: traceId, trace_url: traceUrl, replica, temperature, replay } = detail;
  return (
    <section aria-label="Origin and links" data-testid="origin">
      <h2>Origin</h2>
      <dl className="facts">
        <div>
          <dt>policy</dt>
          <dd>{describeVersions(summary.versions)}</dd>
        </div>
        {temperature !== null && (
          <div>
            <dt>temperature</dt>
            <dd>{formatNumber(temperature)}</dd>
          </div>
        )}
        {replica !== "" && (
          <div>
            <dt>replica</dt>
            <dd>{replica}</dd>
          </div>
        )}
        <div>
          <dt>trace</dt>
          <dd>
            {traceId === "" ? (
              <span className="quiet">none: the run was not traced</span>
            ) : traceUrl === null ? (
              <>
                <span className="mono">{traceId}</span> <Copy value={traceId} label="Copy" />
              </>
            ) : (
              <ExternalLink address={traceUrl}>{traceId}</ExternalLink>
            )}
          </dd>
        </div>
        <div>
          <dt>question</dt>
          <dd>
            <Anchor component={Link} to={paths.question(run, nameQuestion(summary.uid))} size="sm">
              over time
            </Anchor>
          </dd>
        </div>
      </dl>
      <Group gap="xs" mt={8}>
        <AskAgain run={run} question={summary.question} />
        <CopyLink />
        {replay !== "" && <Copy value={replay} label="Copy replay command" />}
      </Group>
      {replay !== "" && (
        <Code block mt={8} fz="0.75rem" style={{ whiteSpace: "pre-wrap", overflowWrap: "anywhere" }}>
          {replay}
        </Code>
      )}
    </section>
  );
}

/** Leads to the page Ask, with the version that would answer where one is served. */
function AskAgain({ run, question }: { run: string; question: string }) {
  const { data } = api.useQuery(
    "get",
    "/api/runs/{run}/ask",
    { params: { path: { run } } },
    { retry: false, staleTime: 60_000 },
  );
  const version = data?.is_ready === true ? data.version : null;
  return (
    <Button
      component={Link}
      to={paths.ask(run, { question })}
      variant="default"
      size="compact-sm"
      title={data?.problem ?? undefined}
    >
      {version === null ? "Ask again" : `Ask again under version ${version}`}
    </Button>
  );
}

function CopyLink() {
  // Rendered anew with every change of the address.
  useSearchParams();
  return <Copy value={window.location.href} label="Copy link" />;
}

function Copy({ value, label }: { value: string; label: string }) {
  return (
    <CopyButton value={value}>
      {({ copied, copy }) => (
        <Button variant="default" size="compact-sm" onClick={copy}>
          {copied ? "Copied" : label}
        </Button>
      )}
    </CopyButton>
  );
}

function describeVersions(versions: readonly number[] | null): string {
  if (versions === null) return "version unknown";
  const [first, last] = versions;
  return first === last ? `version ${first ?? UNKNOWN}` : `versions ${first ?? UNKNOWN}–${last ?? UNKNOWN}`;
}

/** A question's name is its group's without the epoch. */
export function nameQuestion(uid: string): string {
  return uid.slice(0, Math.max(0, uid.lastIndexOf("/"))) || uid;
}

function explainWhole(detail: Detail, credit: Credit): string {
  const { summary } = detail;
  const isSearching = summary.searches > 0 && summary.search_advantage !== null;
  const what = isSearching ? (summary.searches === 1 ? "Its search" : "Its searching") : "It";
  return explainAdvantage(what, isSearching ? summary.search_advantage : summary.advantage, credit);
}

/** The critic's mean value over the tokens of a turn. */
function meanOfTurn({ tokens }: Detail, turn: number | null): number | null {
  const values = tokens?.value?.filter((value, place) => value !== null && tokens.turn[place] === turn) as
    number[] | undefined;
  return values === undefined || values.length === 0
    ? null
    : values.reduce((sum, value) => sum + value, 0) / values.length;
}

/** The token with the largest value by size; after the one that is shown, the next largest. */
export function findNextStrongest(values: readonly (number | null)[] | null, shown: number | null): number | null {
  if (values === null) return null;
  const size = (token: number) => Math.abs(values[token] ?? 0);
  const isAfter = (token: number, other: number) =>
    size(token) < size(other) || (size(token) === size(other) && token > other);
  let [best, next]: [number | null, number | null] = [null, null];
  for (let token = 0; token < values.length; token += 1) {
    if (values[token] === null) continue;
    if (best === null || isAfter(best, token)) best = token;
    if (shown !== null && values[shown] != null && isAfter(token, shown) && (next === null || isAfter(next, token)))
      next = token;
  }
  return next ?? best;
}
