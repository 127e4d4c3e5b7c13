import { Badge, Group, Progress, Stack, Text } from "@mantine/core";
import type { Model } from "../api/client";
import { useNavigate } from "react-router";
import { paths, withQuery } from "../app/paths";
import { NoteCell, TagsCell } from "../runs/NotesCells";
import { formatDuration, formatTime } from "../ui/format";
import { describeTimeLeft, shareDone } from "./progress";

/** How far the run is, and what it is. */
export function RunHeader({ detail }: { detail: Model<"RunDetail"> }) {
  const navigate = useNavigate();
  const { run, restarts } = detail;
  const { progress } = run;
  const total = run.total_steps;
  const left = describeTimeLeft(progress.left_s, run.state);
  const isGoing = left !== null;
  const share = total === null ? null : shareDone({ done: run.step, total });
  // In training the phase counts the steps, which the bar shows.
  const isTraining = progress.total === total;
  const restarted = Object.entries(restarts).filter(([, count]) => count > 0);
  return (
    <Stack gap={6} className="card" p="md" data-testid="run-header">
      <Group justify="space-between" gap="xs">
        <Text className="number" data-testid="run-progress">
          <b>
            step {run.step}
            {total !== null && ` of ${total}`}
          </b>{" "}
          <span className="quiet">
            {progress.phase}
            {progress.detail !== "" && progress.detail !== progress.phase && `: ${progress.detail}`}
            {!isTraining && progress.total > 0 && ` (${progress.done} of ${progress.total})`}
          </span>
        </Text>
        <Text className="quiet" size="sm" data-testid="time-left">
          {left ?? (run.updated === null ? "" : `last written ${formatTime(run.updated)}`)}
        </Text>
      </Group>
      {share !== null && (
        <Progress
          value={100 * share}
          color={isGoing ? "var(--accent)" : "var(--quiet)"}
          aria-label={`${run.step} of ${total ?? "?"} steps`}
          transitionDuration={0}
        />
      )}
      <Group gap="xs">
        {run.model !== null && <Badge variant="default">{run.model}</Badge>}
        {run.algorithm !== null && <Badge variant="default">{run.algorithm}</Badge>}
        <TagsCell run={run} known={[]} onChoose={(tag) => void navigate(withQuery(paths.runs(), { tag }))} />
        <Text size="sm" className="quiet">
          started {formatTime(run.started)}
          {run.duration_s !== null && `, ${formatDuration(run.duration_s)}`}
          {restarted.length > 0 &&
            `, restarted: ${restarted.map(([name, count]) => (count > 1 ? `${name} ${count} times` : name)).join(", ")}`}
        </Text>
      </Group>
      <NoteCell run={run} />
    </Stack>
  );
}
