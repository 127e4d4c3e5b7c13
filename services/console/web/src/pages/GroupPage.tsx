import { Anchor, Group, Text } from "@mantine/core";
import { Link, useParams } from "react-router";
import { api } from "../api/client";
import { paths } from "../app/paths";
import { GroupView } from "../trajectory/GroupView";
import { nameQuestion } from "../trajectory/TrajectoryView";
import { Page, type Crumb } from "../ui/Page";
import { StateBadge } from "../ui/StateBadge";
import { EmptyState, Loading, QueryState } from "../ui/states";

export default function GroupPage() {
  const { run = "", place = "", uid = "" } = useParams();
  const query = api.useQuery("get", "/api/runs/{run}/groups/{place}/{uid}", { params: { path: { run, place, uid } } });
  const step = /^step-(\d+)$/.exec(place)?.[1];
  const crumbs: Crumb[] = [
    { label: run, to: paths.run(run) },
    step === undefined
      ? { label: place, to: paths.trajectories(run, { place }) }
      : { label: `Step ${step}`, to: paths.step(run, step) },
  ];
  return (
    <Page title={query.data?.question ?? `Group ${uid}`} crumbs={crumbs}>
      <QueryState query={query} loading={<Loading lines={12} />}>
        {(group) => (
          <>
            <Group gap="xs">
              <StateBadge state={group.state} />
              {group.reason !== null && <Text size="sm">{group.reason}</Text>}
              <Text size="sm" className="quiet" style={{ overflowWrap: "anywhere" }}>
                {group.uid} · accepted: {group.targets.join(" | ") || "–"}
              </Text>
              <Anchor component={Link} size="sm" to={paths.question(run, nameQuestion(group.uid))}>
                the question over time
              </Anchor>
              <Anchor component={Link} size="sm" to={paths.trajectories(run, { place, uid: group.uid })}>
                as a list
              </Anchor>
            </Group>
            {group.samples.length === 0 ? (
              <EmptyState title="No sample of this group was kept">
                The step says what became of it{group.reason === null ? "" : `: ${group.reason}`}.
              </EmptyState>
            ) : (
              <GroupView run={run} group={group} />
            )}
          </>
        )}
      </QueryState>
    </Page>
  );
}
