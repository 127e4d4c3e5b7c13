import { Anchor, Button, Group, SimpleGrid, Stack, Text } from "@mantine/core";
import { keepPreviousData } from "@tanstack/react-query";
import { Link, useLocation, useNavigate, useParams } from "react-router";
import { api, type Model } from "../api/client";
import { paths } from "../app/paths";
import { Groups } from "../step/Groups";
import { Histogram } from "../step/Histogram";
import { StepMetrics } from "../step/Metrics";
import "../step/step.css";
import { TimeBar } from "../step/TimeBar";
import { useHotkeys } from "../ui/hotkeys";
import { Notice } from "../ui/Notice";
import { Page } from "../ui/Page";
import { EmptyState, QueryState } from "../ui/states";

function Steps({ run, step }: { run: string; step: Model<"StepDetail"> }) {
  const navigate = useNavigate();
  // The filter of the groups stays from step to step.
  const { search } = useLocation();
  const to = (other: number) => paths.step(run, other) + search;
  const { previous, next } = step;
  useHotkeys([
    {
      keys: "ArrowLeft",
      label: "Previous step whose trajectories are kept",
      run: () => {
        if (previous !== null) void navigate(to(previous));
      },
    },
    {
      keys: "ArrowRight",
      label: "Next step whose trajectories are kept",
      run: () => {
        if (next !== null) void navigate(to(next));
      },
    },
  ]);
  return (
    <Group gap="xs" component="nav" aria-label="Steps whose trajectories are kept">
      {previous !== null && (
        <Button component={Link} to={to(previous)} variant="default" size="xs" data-testid="previous">
          ← step {previous}
        </Button>
      )}
      {next !== null && (
        <Button component={Link} to={to(next)} variant="default" size="xs" data-testid="next">
          step {next} →
        </Button>
      )}
    </Group>
  );
}

function NotKept({ run, step }: { run: string; step: Model<"StepDetail"> }) {
  const kept = [step.previous, step.next].filter((other) => other !== null);
  return (
    <EmptyState title={`The trajectories of step ${step.step} are not kept`}>
      {kept.length > 0 ? (
        <>
          The nearest that are:{" "}
          {kept.map((other, index) => (
            <span key={other}>
              {index > 0 && ", "}
              <Anchor component={Link} to={paths.step(run, other)} underline="always" data-testid="nearest">
                step {other}
              </Anchor>
            </span>
          ))}
          . trainer.rollout_data_freq says which steps keep theirs.
        </>
      ) : (
        <>No step of this run has kept any yet; trainer.rollout_data_freq says which do.</>
      )}
    </EmptyState>
  );
}

function Step({ run, step }: { run: string; step: Model<"StepDetail"> }) {
  const place = `step-${step.step}`;
  const ask = { place, searches_min: 1, sort: "search_advantage" };
  return (
    <Stack gap="md">
      {step.guards.map((guard) => (
        <Notice key={guard} tone="warn" title="Guard" testId="guard">
          {guard}
        </Notice>
      ))}
      {step.metrics === null ? (
        <EmptyState title="The metrics of this step are not written yet" />
      ) : (
        <StepMetrics metrics={step.metrics} />
      )}
      {step.is_saved ? (
        <Group gap="xs">
          <Button component={Link} to={paths.trajectories(run, ask)} size="xs" data-testid="most-reinforced">
            Where searching was reinforced most
          </Button>
          <Button component={Link} to={paths.trajectories(run, { place })} size="xs" variant="default">
            All {step.trajectories} trajectories
          </Button>
        </Group>
      ) : (
        <NotKept run={run} step={step} />
      )}
      <SimpleGrid cols={{ base: 1, md: step.is_saved ? 2 : 1 }} spacing="md">
        <Stack component="section" gap="xs" p="md" className="card">
          <Text component="h2" fw={650}>
            Where the time went
          </Text>
          <TimeBar seconds={step.seconds} />
        </Stack>
        {step.is_saved && (
          <Stack component="section" gap="xs" p="md" className="card">
            <Text component="h2" fw={650}>
              Advantages
            </Text>
            <Histogram bins={step.advantages} />
          </Stack>
        )}
      </SimpleGrid>
      {step.is_saved && (
        <Stack component="section" gap="xs">
          <Text component="h2" fw={650}>
            Groups
          </Text>
          <Groups run={run} place={place} groups={step.groups} />
        </Stack>
      )}
    </Stack>
  );
}

export default function StepPage() {
  const { run = "", step = "" } = useParams();
  const number = /^\d+$/.test(step) ? Number(step) : -1;
  const query = api.useQuery(
    "get",
    "/api/runs/{run}/steps/{step}",
    { params: { path: { run, step: number } } },
    { placeholderData: keepPreviousData, enabled: number >= 0 },
  );
  const shown = query.data;
  return (
    <Page
      title={`Step ${step}`}
      crumbs={[{ label: run, to: paths.run(run) }]}
      aside={shown !== undefined && <Steps run={run} step={shown} />}
    >
      {number < 0 ? (
        <EmptyState title={`"${step}" is no step`}>A step is a number, from 1.</EmptyState>
      ) : (
        <QueryState query={query}>
          {(data) => (
            <div style={query.isPlaceholderData ? { opacity: 0.5 } : undefined} aria-busy={query.isPlaceholderData}>
              <Step run={run} step={data} />
            </div>
          )}
        </QueryState>
      )}
    </Page>
  );
}
