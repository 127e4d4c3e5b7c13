import { Button, Group, Text } from "@mantine/core";
import { keepPreviousData } from "@tanstack/react-query";
import { Link, useNavigate, useParams, useSearchParams } from "react-router";
import { api } from "../api/client";
import { paths } from "../app/paths";
import { linkList, useNeighbours } from "../trajectory/neighbours";
import { TrajectoryView } from "../trajectory/TrajectoryView";
import { formatNumber } from "../ui/format";
import { useHotkeys } from "../ui/hotkeys";
import { Page } from "../ui/Page";
import { Loading, QueryState } from "../ui/states";

export default function TrajectoryPage() {
  const { run = "", place = "", row = "" } = useParams();
  const [search] = useSearchParams();
  const navigate = useNavigate();
  const number = Number(row);
  const query = api.useQuery(
    "get",
    "/api/runs/{run}/trajectories/{place}/{row}",
    { params: { path: { run, place, row: number } } },
    { placeholderData: keepPreviousData, staleTime: 60_000 },
  );
  const detail = query.data;
  const { previous, next, index, total } = useNeighbours(run, detail, search);
  const open = (to: string | null) => () => {
    // One step back in the history leads to the list, however many trajectories were read.
    if (to !== null) void navigate(to, { replace: true });
  };
  useHotkeys([
    { keys: "j", label: "Next trajectory", run: open(next) },
    { keys: "k", label: "Previous trajectory", run: open(previous) },
  ]);
  const summary = detail?.summary;
  const crumbs = [
    { label: run, to: paths.run(run) },
    { label: "Trajectories", to: linkList(run, search) },
  ];
  if (summary !== undefined && (detail?.group.length ?? 0) > 1) {
    crumbs.push({ label: `Group ${summary.uid}`, to: paths.group(run, summary.place, summary.uid) });
  }
  return (
    <Page
      title={summary?.question ?? `Trajectory ${row} of ${place}`}
      crumbs={crumbs}
      aside={
        <Group gap={6} wrap="nowrap">
          {index !== null && (
            <Text size="sm" className="quiet number">
              {formatNumber(index + 1)} of {formatNumber(total)}
            </Text>
          )}
          <Step to={previous} label="Previous" hint="Previous trajectory (k)" />
          <Step to={next} label="Next" hint="Next trajectory (j)" />
        </Group>
      }
    >
      <QueryState query={query} loading={<Loading lines={12} />}>
        {(data) => <TrajectoryView key={`${data.summary.place} ${data.summary.row}`} run={run} detail={data} />}
      </QueryState>
    </Page>
  );
}

function Step({ to, label, hint }: { to: string | null; label: string; hint: string }) {
  if (to === null) {
    return (
      <Button variant="default" size="compact-sm" disabled>
        {label}
      </Button>
    );
  }
  return (
    <Button component={Link} to={to} replace variant="default" size="compact-sm" title={hint}>
      {label}
    </Button>
  );
}
