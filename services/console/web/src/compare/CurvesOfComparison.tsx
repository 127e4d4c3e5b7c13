// Metrics of both runs in the same figures.
import { Checkbox, Group, MultiSelect, SimpleGrid, Slider, Stack, Text, Title } from "@mantine/core";
import { useMemo } from "react";
import { api } from "../api/client";
import { Curve } from "../ui/Curve";
import { asFlag, asList, asNumber, useSearchParam } from "../ui/searchParams";
import { EmptyState, ErrorState, Loading } from "../ui/states";
import { chooseMetrics, overlay } from "./curves";

const NONE: string[] = [];

export function CurvesOfComparison({ a, b, metrics }: { a: string; b: string; metrics: string[] }) {
  const [wanted, setWanted] = useSearchParam("metrics", asList, NONE);
  const [smoothing, setSmoothing] = useSearchParam("smooth", asNumber, 0);
  const [isLog, setLog] = useSearchParam("log", asFlag, false);
  const names = useMemo(() => chooseMetrics(metrics, wanted), [metrics, wanted]);
  const options = { enabled: names.length > 0, placeholderData: (before: unknown) => before as never };
  const init = (run: string) => ({ params: { path: { run }, query: { names } } });
  const curvesOfA = api.useQuery("get", "/api/runs/{run}/curves", init(a), options);
  const curvesOfB = api.useQuery("get", "/api/runs/{run}/curves", init(b), options);
  const figures = useMemo(
    () =>
      curvesOfA.data && curvesOfB.data
        ? names.map((name) => ({ name, ...overlay(curvesOfA.data, curvesOfB.data, name) }))
        : [],
    [curvesOfA.data, curvesOfB.data, names],
  );
  const error: unknown = curvesOfA.error ?? curvesOfB.error;
  return (
    <Stack gap="xs" component="section" aria-labelledby="curves">
      <Title order={2} size="h4" id="curves">
        Curves
      </Title>
      {metrics.length === 0 ? (
        <EmptyState title="The runs have no metric in common">A run that has taken no step has none yet.</EmptyState>
      ) : (
        <>
          <Group gap="lg" align="flex-end">
            <MultiSelect
              label="Metrics"
              size="xs"
              miw={260}
              maw={620}
              data={metrics}
              value={names}
              onChange={setWanted}
              searchable
              hidePickedOptions
            />
            <div>
              <Text size="xs" id="smoothing">
                Smoothing {smoothing}
              </Text>
              <Slider
                size="sm"
                w={150}
                min={0}
                max={0.95}
                step={0.05}
                label={null}
                value={smoothing}
                onChange={(value) => {
                  setSmoothing(Number(value.toFixed(2)));
                }}
                thumbProps={{ "aria-labelledby": "smoothing" }}
              />
            </div>
            <Checkbox
              size="xs"
              label="logarithmic"
              checked={isLog}
              onChange={(event) => {
                setLog(event.currentTarget.checked);
              }}
            />
          </Group>
          {error ? <ErrorState error={error} /> : null}
          {(curvesOfA.isPending || curvesOfB.isPending) && !error && names.length > 0 && <Loading />}
          {names.length === 0 && <EmptyState title="No metric is chosen" />}
          <SimpleGrid cols={{ base: 1, md: 2, xl: 3 }} spacing="sm">
            {figures.map(({ name, steps, a: valuesOfA, b: valuesOfB }) => (
              <Curve
                key={name}
                title={name}
                x={steps}
                series={[
                  { name: "a", label: "A", values: valuesOfA, color: "--series-1" },
                  { name: "b", label: "B", values: valuesOfB, color: "--series-2" },
                ]}
                smoothing={smoothing}
                log={isLog}
                height={180}
                syncName="compare"
              />
            ))}
          </SimpleGrid>
        </>
      )}
    </Stack>
  );
}
