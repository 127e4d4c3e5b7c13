// The figures of the live page: what is drawn into each.
import type { Model } from "../api/client";
import type { Series } from "../ui/Curve";
import { formatNumber, formatScore } from "../ui/format";
import type { Curves } from "./curves";

type Validation = Model<"ValidationRow">;

export interface Figure {
  title: string;
  unit: string;
  series: Series[];
  /** Parts of a whole, drawn upon each other. */
  stacked: boolean;
  format: (value: number | null) => string;
}

/** Lists the values of x: the steps, and those of validations between and before them. */
export function listSteps(curves: Curves, validations: Validation[]): number[] {
  return [...new Set([...curves.steps, ...validations.map(({ step }) => step)])].toSorted((a, b) => a - b);
}

/** Spreads a column over more steps; those that it does not know are gaps. */
function spread(curves: Curves, name: string, x: number[]): (number | null)[] {
  const values = curves.columns[name];
  if (values === undefined) return x.map(() => null);
  if (x.length === curves.steps.length) return values;
  const places = new Map(curves.steps.map((step, place) => [step, place]));
  return x.map((step) => {
    const place = places.get(step);
    return place === undefined ? null : (values[place] ?? null);
  });
}

/** Exact match of validations, greedy, with intervals: points of their own beside the sampled answers. */
export function makeValidationSeries(validations: Validation[], x: number[]): Series[] {
  const sources = [...new Set(validations.flatMap(({ em_by_source }) => Object.keys(em_by_source)))].toSorted();
  const pick = (name: string, label: string, color: string, read: (row: Validation) => Model<"Estimate"> | null) => {
    const at = new Map<number, Model<"Estimate">>();
    for (const row of validations) {
      const estimate = read(row);
      // Of two validations at one step the one with more questions says more.
      if (estimate !== null && estimate.count >= (at.get(row.step)?.count ?? 0)) at.set(row.step, estimate);
    }
    const column = (part: "mean" | "low" | "high") => x.map((step) => at.get(step)?.[part] ?? null);
    const values = column("mean");
    const series = { name, label, color, values, low: column("low"), high: column("high"), sparse: true, dashed: true };
    return at.size > 0 ? [series] : [];
  };
  return [
    ...pick("validation", "greedy, validations", "--series-1", (row) => (row.is_watch ? null : row.em)),
    ...(sources.length > 1
      ? sources.flatMap((source, number) =>
          pick(`validation ${source}`, `greedy, ${source}`, `--series-${(number + 2) % 6}`, (row) =>
            row.is_watch ? null : (row.em_by_source[source] ?? null),
          ),
        )
      : []),
    ...pick("watch", "greedy, watched questions", "--series-3", (row) => (row.is_watch ? row.em : null)),
  ];
}

/** The names of all metrics that the figures need. */
export function listNames(groups: Model<"CurveGroup">[], more: string[]): string[] {
  return [...new Set([...groups.flatMap(({ curves }) => Object.keys(curves)), ...more])];
}

export function makeFigures(
  groups: Model<"CurveGroup">[],
  more: string[],
  curves: Curves,
  validations: Validation[],
  x: number[],
): Figure[] {
  const figures = groups.map(({ title, unit, curves: labels }): Figure => {
    const names = Object.keys(labels);
    const isTime = names.every((name) => /^seconds[./]/.test(name));
    const isMatch = names.includes("em_mean");
    const sampled = names.map((name, number): Series => {
      const label = labels[name] ?? name;
      const values = spread(curves, name, x);
      if (!isMatch) return { name, label, values };
      // Sources have the colours of their validations.
      const color = number === 0 ? "--series-0" : `--series-${(number + 1) % 6}`;
      return { name, label: `sampled, ${label}`, values, color };
    });
    // What takes no time in any step only fills the legend.
    const series = isTime ? sampled.filter(({ values }) => values.some((value) => (value ?? 0) > 0)) : sampled;
    return {
      title: isMatch ? "Exact match" : title,
      unit: unit === "share" ? "" : unit,
      series: isMatch ? [...series, ...makeValidationSeries(validations, x)] : series,
      stacked: isTime,
      format: unit === "share" ? formatScore : (value) => formatNumber(value),
    };
  });
  const others = more.map((name): Figure => ({
    title: name,
    unit: "",
    series: [{ name, label: name, values: spread(curves, name, x) }],
    stacked: false,
    format: (value) => formatNumber(value),
  }));
  return [...figures.filter(({ series }) => series.length > 0), ...others];
}

/** Counts values that a logarithmic axis cannot show. */
export function countNotPositive(series: Series[]): number {
  return series.reduce((sum, { values }) => sum + values.filter((value) => value !== null && value <= 0).length, 0);
}

/** Whether a figure has anything to show on a logarithmic axis; areas begin at 0, which it has not. */
export function canBeLogarithmic({ stacked, series }: Pick<Figure, "stacked" | "series">): boolean {
  return !stacked && series.some(({ values }) => values.some((value) => value !== null && value > 0));
}
