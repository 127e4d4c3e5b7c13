// All runs, the newest first; two of them can be compared.
import { Anchor, Badge, Button, Checkbox, Code, Group, Progress, Text } from "@mantine/core";
import { useCallback, useMemo, useState } from "react";
import { Link, useNavigate } from "react-router";
import { api } from "../api/client";
import { paths } from "../app/paths";
import { describeTimeLeft, shareDone } from "../run/progress";
import { choose, countTags, describeSteps, filterRuns, orderByStart, type Run } from "../runs/list";
import { NoteCell, TagsCell } from "../runs/NotesCells";
import { DataTable, type Column } from "../ui/DataTable";
import { Duration, formatScore, formatTime, Score, UNKNOWN } from "../ui/format";
import { useHotkeys } from "../ui/hotkeys";
import { Page } from "../ui/Page";
import { SearchInput } from "../ui/SearchInput";
import { asText, useSearchParam } from "../ui/searchParams";
import { Sparkline } from "../ui/Sparkline";
import { StateBadge } from "../ui/StateBadge";
import { EmptyState, QueryState } from "../ui/states";

function RunName({ run }: { run: Run }) {
  return (
    <>
      <Group gap={6} wrap="nowrap">
        <Anchor component={Link} to={paths.run(run.id)} fw={600} size="sm" style={{ whiteSpace: "nowrap" }}>
          {run.id}
        </Anchor>
        {run.is_latest && (
          <Badge variant="default" size="xs" title="The run that runs/latest names">
            latest
          </Badge>
        )}
      </Group>
      {run.problem !== null && (
        <Text size="xs" c="var(--bad)" maw={420}>
          {run.problem}
        </Text>
      )}
    </>
  );
}

function RunStateCell({ run }: { run: Run }) {
  const isMoving = run.state === "running" || run.state === "starting";
  const left = describeTimeLeft(run.progress.left_s, run.state);
  return (
    <>
      <StateBadge state={run.state} />
      {isMoving && (
        <>
          <Progress
            value={100 * shareDone(run.progress)}
            size="xs"
            mt={4}
            aria-label={`${run.progress.phase} ${run.progress.detail}`}
          />
          <Text size="xs" className="quiet">
            {run.progress.phase}
            {left !== null && `, ${left}`}
          </Text>
        </>
      )}
    </>
  );
}

function BestScore({ run }: { run: Run }) {
  if (run.best_em === null) return <span className="quiet">{UNKNOWN}</span>;
  const { mean, low, high, count } = run.best_em;
  return (
    <span title={`greedy, validation '${run.best_label ?? ""}', ${count} questions`}>
      <Score value={mean} low={low} high={high} />
    </span>
  );
}

function formatStart(started: number | null): string {
  if (started === null) return UNKNOWN;
  const parts = { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" } as const;
  return new Date(started * 1000).toLocaleString("en-GB", parts);
}

interface TableProps {
  runs: Run[];
  all: Run[];
  chosen: string[];
  onChoose: (id: string) => void;
  onTag: (tag: string) => void;
  empty: React.ReactNode;
}

function RunsTable({ runs, all, chosen, onChoose, onTag, empty }: TableProps) {
  const known = useMemo(() => countTags(all).map(([tag]) => tag), [all]);
  const columns = useMemo<Column<Run>[]>(
    () => [
      {
        id: "choose",
        header: "Choose",
        hidesHeader: true,
        width: 36,
        cell: ({ id }) => (
          <Checkbox
            size="xs"
            checked={chosen.includes(id)}
            onChange={() => {
              onChoose(id);
            }}
            aria-label={`Choose ${id} for a comparison`}
          />
        ),
      },
      { id: "run", header: "Run", cell: (run) => <RunName run={run} />, sortValue: ({ id }) => id },
      {
        id: "curve",
        header: "EM, sampled",
        hint: "Exact match of the sampled answers over all steps (reward where there is none)",
        cell: ({ sparkline }) => <Sparkline values={sparkline} label="Exact match, sampled" format={formatScore} />,
        sortValue: ({ sparkline }) => sparkline.findLast((value) => value !== null),
      },
      { id: "state", header: "State", cell: (run) => <RunStateCell run={run} />, sortValue: ({ state }) => state },
      {
        id: "best",
        header: "Best EM, greedy",
        hint: "Exact match of the best validation, with its 95 % interval",
        cell: (run) => <BestScore run={run} />,
        sortValue: ({ best_em }) => best_em?.mean,
        numeric: true,
      },
      {
        id: "model",
        header: "Model",
        cell: ({ model }) => <span className="nowrap">{model ?? UNKNOWN}</span>,
        sortValue: ({ model }) => model,
      },
      {
        id: "algorithm",
        header: "Algorithm",
        cell: ({ algorithm }) => algorithm ?? UNKNOWN,
        sortValue: ({ algorithm }) => algorithm,
      },
      {
        id: "steps",
        header: "Steps",
        cell: (run) => <span className="nowrap">{describeSteps(run)}</span>,
        sortValue: ({ step }) => step,
        numeric: true,
      },
      {
        id: "duration",
        header: "Duration",
        cell: ({ duration_s }) => (
          <span className="nowrap">
            <Duration seconds={duration_s} />
          </span>
        ),
        sortValue: ({ duration_s }) => duration_s,
        numeric: true,
      },
      {
        id: "started",
        header: "Started",
        cell: ({ started }) => (
          <span className="number nowrap" title={formatTime(started)}>
            {formatStart(started)}
          </span>
        ),
        sortValue: ({ started }) => started,
      },
      {
        id: "tags",
        header: "Tags",
        cell: (run) => <TagsCell run={run} known={known} onChoose={onTag} />,
        sortValue: ({ notes }) => (notes.tags.length > 0 ? notes.tags.join(" ") : null),
      },
      { id: "note", header: "Note", cell: (run) => <NoteCell run={run} /> },
    ],
    [chosen, onChoose, onTag, known],
  );
  return (
    <DataTable
      label="Runs"
      rows={runs}
      columns={columns}
      rowKey={({ id }) => id}
      rowData={({ id }) => ({ "data-run": id })}
      rowHeight={52}
      maxHeight="calc(100vh - 12rem)"
      empty={empty}
    />
  );
}

/** Chooses the run whose row has the focus. */
function clickCheckbox(): void {
  const row = document.activeElement?.closest("tr");
  row?.querySelector<HTMLInputElement>("input[type=checkbox]")?.click();
}

const NO_RUNS: Run[] = [];

export default function RunsPage() {
  const query = api.useQuery("get", "/api/runs");
  const navigate = useNavigate();
  const [text, setText] = useSearchParam("text", asText, "");
  const [tag, setTag] = useSearchParam("tag", asText, "");
  const [chosen, setChosen] = useState<string[]>([]);
  const all = query.data?.runs ?? NO_RUNS;
  const onChoose = useCallback((id: string) => {
    setChosen((before) => choose(before, id));
  }, []);
  const shown = useMemo(() => filterRuns(all, text, tag), [all, text, tag]);
  const [a, b] = orderByStart(chosen, all);
  const compare = () => void navigate(paths.compare(a, b));
  useHotkeys([
    { keys: "x", label: "Choose the run for a comparison", run: clickCheckbox },
    { keys: "c", label: "Compare the two chosen runs", run: compare },
  ]);
  return (
    <Page
      title="Runs"
      aside={
        <Group gap="xs">
          {tag !== "" && (
            <Button
              variant="default"
              size="xs"
              onClick={() => {
                setTag("");
              }}
              aria-label={`Show runs without the tag ${tag} too`}
            >
              tag: {tag} ×
            </Button>
          )}
          <SearchInput label="Search runs" value={text} onChange={setText} />
          <Button size="xs" onClick={compare} disabled={b === undefined} title="Choose two runs first">
            Compare {chosen.length} of 2
          </Button>
        </Group>
      }
    >
      <QueryState query={query}>
        {({ folder }) => (
          <RunsTable
            runs={shown}
            all={all}
            chosen={chosen}
            onChoose={onChoose}
            onTag={setTag}
            empty={
              all.length === 0 ? (
                <EmptyState title={`There is no run in ${folder}`}>
                  Start one: <Code>make demo</Code> trains a tiny policy in a few minutes, and appears here by itself.
                </EmptyState>
              ) : (
                <EmptyState title="No run has these words">
                  <Button
                    variant="default"
                    size="xs"
                    onClick={() => {
                      setText("");
                      setTag("");
                    }}
                  >
                    Show all {all.length} runs
                  </Button>
                </EmptyState>
              )
            }
          />
        )}
      </QueryState>
    </Page>
  );
}
