// A figure of curves over steps: uPlot draws, React keeps the cursor, the legend, and a table of the same values.
import { Text, UnstyledButton, VisuallyHidden } from "@mantine/core";
import { useElementSize, useMergedRef } from "@mantine/hooks";
import { useEffect, useEffectEvent, useMemo, useRef, useState, type KeyboardEvent, type ReactNode } from "react";
import uPlot from "uplot";
import { findIsolated, prepareValues, stack, summarize, type Values } from "./curveData";
import styles from "./Curve.module.css";
import { DataTable, type Column } from "./DataTable";
import { formatNumber, UNKNOWN } from "./format";

export interface Series {
  name: string;
  label: string;
  values: Values;
  /** A colour or variable of theme.css; by default the next of --series-0 … --series-5. */
  color?: string;
  dashed?: boolean;
  /** Draws lines over gaps and every value as a point: for values that only some steps have, as validations. */
  sparse?: boolean;
  /** The interval around each value, drawn as a bar. */
  low?: Values;
  high?: Values;
}

export interface CurveMark {
  x: number;
  label: string;
  /** A colour or variable of theme.css. */
  color?: string;
  /** Draws a tick at the foot in place of a line with the label: for marks that are many. */
  small?: boolean;
}

interface Props {
  title: string;
  /** Shown beside the title: unit, a hint. */
  note?: ReactNode;
  x: readonly number[];
  xLabel?: string;
  series: Series[];
  marks?: CurveMark[];
  log?: boolean;
  /** Weight of the moving average, from 0 to below 1; what was measured stays visible behind it. */
  smoothing?: number;
  /** Draws the series as areas upon each other, the first at the foot. */
  stacked?: boolean;
  height?: number;
  format?: (value: number | null) => string;
  /** Figures with the same name move their cursors together. */
  syncName?: string;
  /** Called for a click on the figure and for Enter, with the value of x under the cursor, and how far a click may miss. */
  onPoint?: (x: number, reach: number) => void;
}

/** The least part of the highest value that a logarithmic axis shows. */
const DEEPEST = 1e-12;

const LOGARITHMIC: uPlot.Scale = {
  // eslint-disable-next-line @typescript-eslint/no-unsafe-enum-assignment -- the types name an enum that does not exist
  distr: 3,
  // A value that is next to nothing does not press all others into one line, and ticks stay countable.
  range: (_, low: number | null, high: number | null) =>
    low === null || high === null ? [null, null] : uPlot.rangeLog(Math.max(low, high * DEEPEST), high, 10, false),
};

/** Returns what a variable of theme.css is now, as a canvas needs it. */
function resolveColor(color: string, element: HTMLElement): string {
  return color.startsWith("--") ? getComputedStyle(element).getPropertyValue(color).trim() : color;
}

function pickColor(series: Series, number: number): string {
  return series.color ?? `--series-${number % 6}`;
}

/** Pixels by which a click may miss a point. */
const REACH = 8;

interface Line {
  series: Series;
  color: string;
  shown: (number | null)[];
  measured: (number | null)[];
}

function prepare(series: Series[], smoothing: number, log: boolean, stacked: boolean): Line[] {
  const lines = series.map((one, number) => ({
    series: one,
    color: pickColor(one, number),
    ...prepareValues(one.values, one.sparse === true ? 0 : smoothing, log && !stacked),
  }));
  if (!stacked) return lines;
  const sums = stack(lines.map(({ shown }) => shown));
  // The highest first: each area covers the lower part of the one before.
  return lines.map((line, number) => ({ ...line, shown: sums[number] ?? [], measured: [] })).toReversed();
}

export function Curve({
  title,
  note,
  x,
  xLabel = "step",
  series,
  marks = [],
  log = false,
  smoothing = 0,
  stacked = false,
  height = 200,
  format = formatNumber,
  syncName,
  onPoint,
}: Props) {
  const box = useRef<HTMLDivElement>(null);
  const { ref: measured, width } = useElementSize<HTMLDivElement>();
  const boxRef = useMergedRef(box, measured);
  const plot = useRef<uPlot | null>(null);
  const [cursor, setCursor] = useState<number | null>(null);
  /** What is zoomed into, which outlives new values and new lines. */
  const zoom = useRef<{ min: number; max: number } | null>(null);
  const [isZoomed, setZoomed] = useState(false);
  const [hidden, setHidden] = useState<ReadonlySet<string>>(new Set());
  const visible = useMemo(() => series.filter(({ name }) => !hidden.has(name)), [series, hidden]);
  const colors = useMemo(() => new Map(series.map((one, number) => [one.name, pickColor(one, number)])), [series]);
  const lines = useMemo(
    () =>
      prepare(visible, smoothing, log, stacked).map((line) => ({
        ...line,
        color: colors.get(line.series.name) ?? line.color,
      })),
    [visible, smoothing, log, stacked, colors],
  );
  const data = useMemo(
    () => [[...x], ...lines.map(({ measured }) => measured), ...lines.map(({ shown }) => shown)] as uPlot.AlignedData,
    [x, lines],
  );
  const last = x.length - 1;
  const at = Math.min(cursor ?? last, last);

  const point = useEffectEvent((drawn: uPlot) => {
    const { idx, left = 0 } = drawn.cursor;
    const value = idx == null ? undefined : x[idx];
    if (value !== undefined) onPoint?.(value, drawn.posToVal(left + REACH, "x") - drawn.posToVal(left, "x"));
  });
  const drawMarks = useEffectEvent((drawn: uPlot) => {
    paintMarks(drawn, marks);
    for (const { series: one, color } of lines) if (one.low && one.high) paintIntervals(drawn, one, color, log);
  });
  const noteZoom = useEffectEvent((drawn: uPlot, scale: string) => {
    const { min, max } = drawn.scales["x"] ?? {};
    const first = x[0];
    const end = x.at(-1);
    if (scale !== "x" || min == null || max == null || first === undefined || end === undefined) return;
    zoom.current = min > first || max < end ? { min, max } : null;
    setZoomed(zoom.current !== null);
  });
  // uPlot leaves out (null) what has no room on a logarithmic axis.
  const describeTick = useEffectEvent((value: number | null) => (value === null ? "" : format(value)));

  // The plot is made anew when its lines change; new values and sizes are given to the one that is there.
  const shape = JSON.stringify([
    lines.map(({ series: one, color }) => [one.name, color, one.dashed, one.sparse]),
    log,
    stacked,
    smoothing > 0,
  ]);
  const latest = useRef({ data, lines });
  useEffect(() => {
    latest.current = { data, lines };
  }, [data, lines]);
  const isVisible = width > 0;
  useEffect(() => {
    const element = box.current;
    if (element === null || !isVisible) return undefined;
    const { lines: drawn, data: values } = latest.current;
    const color = (name: string) => () => resolveColor(name, element);
    const makeSeries = ({ series: one, color: name }: Line, position: number, faint: boolean): uPlot.Series => ({
      stroke: color(name),
      width: faint ? 1 : 1.6,
      alpha: faint ? 0.3 : 1,
      ...(stacked && { fill: color(name) }),
      spanGaps: one.sparse === true,
      ...(one.dashed === true && { dash: [5, 4] }),
      points:
        one.sparse === true
          ? { show: !faint, size: 6, fill: color(name) }
          : {
              show: true,
              size: 4,
              fill: color(name),
              filter: (shown) => findIsolated((shown.data[position] ?? []) as Values),
            },
    });
    const axis = { stroke: color("--quiet"), grid: { stroke: color("--line"), width: 1 }, ticks: { show: false } };
    const smooths = smoothing > 0 && !stacked;
    // While the plot is made it shows everything, which is no wish of the reader.
    let isReady = false;
    const made = new uPlot(
      {
        width: element.clientWidth,
        height,
        legend: { show: false },
        cursor: {
          points: { size: 7 },
          drag: { x: true, y: false },
          ...(syncName !== undefined && { sync: { key: syncName, setSeries: false } }),
        },
        scales: {
          x: { time: false },
          y: stacked ? { range: (_, __, high) => [0, high || 1] } : log ? LOGARITHMIC : {},
        },
        axes: [
          { ...axis, size: 28 },
          {
            ...axis,
            size: 58,
            values: (_, splits) => splits.map((split) => describeTick(split)),
          },
        ],
        series: [
          {},
          ...drawn.map((line, number) => ({ ...makeSeries(line, number + 1, true), show: smooths })),
          ...drawn.map((line, number) => makeSeries(line, drawn.length + number + 1, false)),
        ],
        hooks: {
          setCursor: [
            (shown) => {
              setCursor(shown.cursor.idx ?? null);
            },
          ],
          setScale: [
            (shown, scale) => {
              if (isReady) noteZoom(shown, scale);
            },
          ],
          draw: [
            (shown) => {
              drawMarks(shown);
            },
          ],
        },
      },
      values,
      element,
    );
    isReady = true;
    if (zoom.current) made.setScale("x", zoom.current);
    const onClick = () => {
      // A drag zooms and ends with a click too.
      if (made.select.width === 0) point(made);
    };
    made.over.addEventListener("click", onClick);
    const scheme = new MutationObserver(() => {
      made.redraw(false);
    });
    scheme.observe(document.documentElement, { attributeFilter: ["data-mantine-color-scheme"] });
    plot.current = made;
    return () => {
      plot.current = null;
      scheme.disconnect();
      made.destroy();
    };
  }, [box, isVisible, shape, height, log, stacked, smoothing, syncName]);
  useEffect(() => {
    // New values do not end a zoom.
    plot.current?.setData(data, zoom.current === null);
  }, [data]);
  useEffect(() => {
    if (width > 0) plot.current?.setSize({ width, height });
  }, [width, height]);
  useEffect(() => {
    plot.current?.redraw(false);
  }, [marks]);

  const moveTo = (position: number) => {
    const next = Math.max(0, Math.min(last, position));
    setCursor(next);
    const shown = plot.current;
    const value = x[next];
    if (shown && value !== undefined)
      shown.setCursor({ left: shown.valToPos(value, "x"), top: shown.over.clientHeight / 2 });
  };
  const showAll = () => {
    const shown = plot.current;
    if (!shown) return;
    const together = syncName === undefined ? [shown] : uPlot.sync(syncName).plots;
    for (const one of together) {
      const [first, end] = [one.data[0][0], one.data[0].at(-1)];
      if (first !== undefined && end !== undefined) one.setScale("x", { min: first, max: end });
    }
  };
  const onKeyDown = (event: KeyboardEvent) => {
    const far = Math.max(1, Math.round(last / 10));
    const moves: Record<string, number> = {
      ArrowLeft: at - 1,
      ArrowRight: at + 1,
      PageDown: at - far,
      PageUp: at + far,
      Home: 0,
      End: last,
    };
    const next = moves[event.key];
    if (next !== undefined) moveTo(next);
    else if (event.key === "Escape" && isZoomed) showAll();
    else if (event.key === "Enter" && onPoint && x[at] !== undefined) onPoint(x[at], 0);
    else return;
    event.preventDefault();
  };
  const toggle = (name: string) => {
    setHidden((before) => {
      const after = new Set(before);
      if (!after.delete(name)) after.add(name);
      return after;
    });
  };

  // Only where the reader points: at rest they would be said of the last step by every figure.
  const marksHere = cursor === null ? [] : marks.filter((mark) => mark.x === x[at]);
  const reading = visible.map((one) => `${one.label} ${format(one.values[at] ?? null)}`).join(", ");
  return (
    <figure className={`card ${styles.figure ?? ""}`} aria-label={title} data-testid="curve" data-title={title}>
      <figcaption className={styles.caption}>
        <Text component="span" fw={600} size="sm">
          {title}
        </Text>
        {note !== undefined && <span className="quiet">{note}</span>}
        {isZoomed && (
          <UnstyledButton className={styles.reset} onClick={showAll} title="Or a double click, or Escape">
            show all
          </UnstyledButton>
        )}
        <span className="quiet number">
          {x.length > 0 && `${xLabel} ${x[at] ?? UNKNOWN}`}
          {marksHere.length > 0 && `: ${marksHere.map(({ label }) => label).join(", ")}`}
        </span>
      </figcaption>
      <div className={styles.legend}>
        {series.map((one) => (
          <UnstyledButton
            key={one.name}
            className={styles.key}
            aria-pressed={!hidden.has(one.name)}
            title={hidden.has(one.name) ? `Show ${one.label}` : `Hide ${one.label}`}
            onClick={() => {
              toggle(one.name);
            }}
          >
            <span
              className={styles.swatch}
              data-dashed={one.dashed === true || undefined}
              data-area={stacked || undefined}
              style={{ borderColor: toCss(colors.get(one.name) ?? "--series-0") }}
            />
            {one.label} <span className="number">{format(one.values[at] ?? null)}</span>
          </UnstyledButton>
        ))}
      </div>
      {x.length === 0 ? (
        <Text className="quiet" size="sm" p="sm">
          No step yet.
        </Text>
      ) : (
        <div
          ref={boxRef}
          className={styles.plot}
          style={{ height, cursor: onPoint ? "pointer" : undefined }}
          role="slider"
          tabIndex={0}
          aria-label={`${title}: read the values by ${xLabel}${onPoint ? ", Enter opens it" : ""}`}
          aria-valuemin={x[0] ?? 0}
          aria-valuemax={x[last] ?? 0}
          aria-valuenow={x[at] ?? 0}
          aria-valuetext={`${xLabel} ${x[at] ?? UNKNOWN}: ${reading}`}
          onKeyDown={onKeyDown}
        />
      )}
      <VisuallyHidden>{visible.map((one) => describe(one, x, xLabel, format)).join(" ")}</VisuallyHidden>
      {x.length > 0 && <TableOf title={title} x={x} xLabel={xLabel} series={visible} format={format} />}
    </figure>
  );
}

function toCss(color: string): string {
  return color.startsWith("--") ? `var(${color})` : color;
}

function describe(
  { label, values }: Series,
  x: readonly number[],
  xLabel: string,
  format: (value: number | null) => string,
): string {
  const summary = summarize(x, values);
  if (summary === null) return `${label}: no values.`;
  const { first, firstAt, last, lastAt, low, lowAt, high, highAt, known } = summary;
  const gaps = known < x.length ? ` ${x.length - known} of ${x.length} have no value.` : "";
  return (
    `${label}: from ${format(first)} at ${xLabel} ${firstAt} to ${format(last)} at ${xLabel} ${lastAt}, ` +
    `lowest ${format(low)} at ${lowAt}, highest ${format(high)} at ${highAt}.${gaps}`
  );
}

function TableOf({
  title,
  x,
  xLabel,
  series,
  format,
}: {
  title: string;
  x: readonly number[];
  xLabel: string;
  series: Series[];
  format: (value: number | null) => string;
}) {
  const [isOpen, setOpen] = useState(false);
  const columns: Column<number>[] = [
    { id: "x", header: xLabel, cell: (position) => x[position], sortValue: (position) => x[position], numeric: true },
    ...series.map((one) => ({
      id: one.name,
      header: one.label,
      cell: (position: number) => format(one.values[position] ?? null),
      sortValue: (position: number) => one.values[position],
      numeric: true,
    })),
  ];
  return (
    <details
      className={styles.table}
      onToggle={(event) => {
        setOpen(event.currentTarget.open);
      }}
    >
      <summary>Values as a table</summary>
      {isOpen && (
        <DataTable
          label={`${title}: values`}
          rows={x.map((_, position) => position)}
          rowKey={String}
          columns={columns}
          maxHeight={320}
          hotkeys={false}
        />
      )}
    </details>
  );
}

/** Draws marks as lines with their labels; a label that would cover the one before it is left out. */
function paintMarks(plot: uPlot, marks: CurveMark[]): void {
  const { ctx, bbox } = plot;
  const ratio = uPlot.pxRatio;
  const colors = new Map<string, string>();
  let free = -Infinity;
  ctx.save();
  ctx.font = `${11 * ratio}px system-ui, sans-serif`;
  ctx.textBaseline = "top";
  ctx.lineWidth = ratio;
  for (const { x, label, color = "--quiet", small = false } of marks.toSorted((one, other) => one.x - other.x)) {
    const left = plot.valToPos(x, "x", true);
    if (left < bbox.left || left > bbox.left + bbox.width) continue;
    const known = colors.get(color) ?? resolveColor(color, plot.root);
    colors.set(color, known);
    ctx.strokeStyle = ctx.fillStyle = known;
    const foot = bbox.top + bbox.height;
    if (small) {
      ctx.beginPath();
      ctx.moveTo(left, foot - 7 * ratio);
      ctx.lineTo(left - 3 * ratio, foot);
      ctx.lineTo(left + 3 * ratio, foot);
      ctx.fill();
      continue;
    }
    ctx.globalAlpha = 0.7;
    ctx.setLineDash([3 * ratio, 3 * ratio]);
    ctx.beginPath();
    ctx.moveTo(left, bbox.top);
    ctx.lineTo(left, foot);
    ctx.stroke();
    ctx.globalAlpha = 1;
    const size = ctx.measureText(label).width;
    const begin = Math.min(left + 3 * ratio, bbox.left + bbox.width - size);
    if (begin <= free) continue;
    ctx.fillText(label, begin, bbox.top + 2 * ratio);
    free = begin + size + 6 * ratio;
  }
  ctx.restore();
}

/** Draws the interval of each value as an upright bar with feet. */
function paintIntervals(plot: uPlot, { low = [], high = [] }: Series, color: string, log: boolean): void {
  const { ctx, bbox } = plot;
  const ratio = uPlot.pxRatio;
  const clamp = (top: number) => Math.min(bbox.top + bbox.height, Math.max(bbox.top, top));
  ctx.save();
  ctx.strokeStyle = resolveColor(color, plot.root);
  ctx.lineWidth = 1.3 * ratio;
  plot.data[0].forEach((x, position) => {
    const ends = [low[position] ?? null, high[position] ?? null];
    const left = plot.valToPos(x, "x", true);
    if (left < bbox.left || left > bbox.left + bbox.width) return;
    const [foot, head] = ends.map((end) => {
      if (end === null) return null;
      return log && end <= 0 ? bbox.top + bbox.height : clamp(plot.valToPos(end, "y", true));
    });
    if (foot == null || head == null) return;
    ctx.beginPath();
    ctx.moveTo(left, foot);
    ctx.lineTo(left, head);
    for (const end of [foot, head]) {
      ctx.moveTo(left - 3 * ratio, end);
      ctx.lineTo(left + 3 * ratio, end);
    }
    ctx.stroke();
  });
  ctx.restore();
}
