import { Chip, Group, MultiSelect, SimpleGrid, Slider, Stack, Switch, Text } from "@mantine/core";
import { useCallback, useMemo, useState } from "react";
import { useNavigate } from "react-router";
import type { Model } from "../api/client";
import { paths } from "../app/paths";
import { Curve } from "../ui/Curve";
import { asFlag, asList, asNumber, useSearchParam } from "../ui/searchParams";
import { EmptyState, ErrorState, Loading } from "../ui/states";
import { canBeLogarithmic, countNotPositive, listNames, listSteps, makeFigures, type Figure } from "./figures";
import { countKinds, makeMarks } from "./marks";
import { snapStep } from "./steps";
import { useCurves } from "./useCurves";

/** The weight of smoothing, in the address; moving the slider changes it when it is let go. */
function Smoothing({ value, onChange }: { value: number; onChange: (value: number) => void }) {
  const [shown, setShown] = useState(value);
  const [known, setKnown] = useState(value);
  if (known !== value) {
    setKnown(value);
    setShown(value);
  }
  return (
    <Group gap="xs" wrap="nowrap">
      <Text size="sm" id="smoothing">
        Smoothing
      </Text>
      <Slider
        w={150}
        min={0}
        max={0.99}
        step={0.01}
        value={shown}
        onChange={setShown}
        onChangeEnd={onChange}
        label={null}
        thumbProps={{ "aria-labelledby": "smoothing" }}
        data-testid="smoothing"
      />
      <Text size="sm" className="number quiet" w={32}>
        {shown.toFixed(2)}
      </Text>
    </Group>
  );
}

function MarkLegend({
  detail,
  hidden,
  onChange,
}: {
  detail: Model<"RunDetail">;
  hidden: string[];
  onChange: (hidden: string[]) => void;
}) {
  const kinds = countKinds(detail);
  if (kinds.length === 0) return null;
  const toggle = (kind: string) => {
    onChange(hidden.includes(kind) ? hidden.filter((other) => other !== kind) : [...hidden, kind]);
  };
  return (
    <Group gap={6} role="group" aria-label="Marks in the curves">
      {kinds.map(({ kind, label, color, small, count }) => (
        <Chip
          key={kind}
          size="xs"
          variant="outline"
          checked={!hidden.includes(kind)}
          onChange={() => {
            toggle(kind);
          }}
          data-testid={`mark-${kind}`}
        >
          <span className={small ? "mark-tick" : "mark-line"} style={{ color: `var(${color})` }} aria-hidden="true" />
          {label} {count}
        </Chip>
      ))}
    </Group>
  );
}

/** The unit, and what a logarithmic axis leaves out. */
function describeNote(figure: Figure, isLog: boolean, wantsLog: boolean): string {
  const left = isLog ? countNotPositive(figure.series) : 0;
  const missing = left > 0 ? `${left} values ≤ 0 not drawn` : wantsLog && !isLog ? "linear" : "";
  return [figure.unit, missing].filter((part) => part !== "").join("; ");
}

/** The curves of a run as small figures. */
export function Figures({ run, detail }: { run: string; detail: Model<"RunDetail"> }) {
  const navigate = useNavigate();
  const [smoothing, setSmoothing] = useSearchParam("smooth", asNumber, 0);
  const [log, setLog] = useSearchParam("log", asFlag, false);
  const [hidden, setHidden] = useSearchParam("hide", asList, []);
  const [more, setMore] = useSearchParam("more", asList, []);
  const { groups, metrics, validations, saved_steps: saved } = detail;
  const names = useMemo(() => listNames(groups, more), [groups, more]);
  const query = useCurves(run, detail, names);
  const curves = query.data;
  const x = useMemo(() => (curves === undefined ? [] : listSteps(curves, validations)), [curves, validations]);
  const figures = useMemo(
    () => (curves === undefined ? [] : makeFigures(groups, more, curves, validations, x)),
    [groups, more, curves, validations, x],
  );
  const marks = useMemo(() => makeMarks(detail, hidden), [detail, hidden]);
  const others = useMemo(() => {
    const drawn = new Set(groups.flatMap((group) => Object.keys(group.curves)));
    return metrics.filter((name) => !drawn.has(name));
  }, [groups, metrics]);
  const open = useCallback(
    (step: number, reach: number) => {
      const meant = snapStep(saved, step, reach);
      if (meant > 0) void navigate(paths.step(run, meant));
    },
    [navigate, run, saved],
  );
  if (names.length === 0) {
    return (
      <EmptyState title="No step has been taken yet">
        The curves begin with the first one; Health says what the run waits for.
      </EmptyState>
    );
  }
  if (curves === undefined) {
    return query.error ? (
      <ErrorState error={query.error} onRetry={() => void query.refetch()} />
    ) : (
      <Loading lines={6} />
    );
  }
  const weight = Math.min(0.99, Math.max(0, smoothing));
  return (
    <Stack gap="sm">
      {query.error ? <ErrorState error={query.error} onRetry={() => void query.refetch()} /> : null}
      <Group gap="lg">
        <Smoothing value={weight} onChange={setSmoothing} />
        <Switch
          size="xs"
          label="Logarithmic"
          checked={log}
          onChange={(event) => {
            setLog(event.currentTarget.checked);
          }}
          data-testid="log"
        />
        <MarkLegend detail={detail} hidden={hidden} onChange={setHidden} />
      </Group>
      <Text size="sm" className="quiet">
        A click on a curve, or Enter, opens the step. Drag to zoom, a double click shows all again.
      </Text>
      <SimpleGrid cols={{ base: 1, sm: 2, xl: 3 }} spacing="sm" data-testid="figures">
        {figures.map((figure) => {
          const isLog = log && canBeLogarithmic(figure);
          return (
            <Curve
              key={figure.title}
              title={figure.title}
              note={describeNote(figure, isLog, log)}
              x={x}
              series={figure.series}
              marks={marks}
              log={isLog}
              smoothing={weight}
              stacked={figure.stacked}
              height={170}
              format={figure.format}
              syncName={run}
              onPoint={open}
            />
          );
        })}
      </SimpleGrid>
      {others.length > 0 && (
        <MultiSelect
          label="More metrics"
          placeholder={more.length === 0 ? "Draw any metric of the run" : ""}
          data={others}
          value={more.filter((name) => others.includes(name))}
          onChange={setMore}
          searchable
          clearable
          maw={600}
        />
      )}
    </Stack>
  );
}
