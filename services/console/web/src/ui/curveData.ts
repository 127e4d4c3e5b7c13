// The values of curves, made ready to draw. A value that is not known (null) stays a gap.

export type Values = readonly (number | null)[];

/**
 * Smooths with an exponential moving average; `weight` from 0 (as measured) to below 1. The first values are not pulled
 * towards 0, and a gap stays one without ending the average.
 */
export function smooth(values: Values, weight: number): (number | null)[] {
  if (weight <= 0) return [...values];
  let sum = 0;
  let scale = 0;
  return values.map((value) => {
    if (value === null || !Number.isFinite(value)) return null;
    sum = weight * sum + (1 - weight) * value;
    scale = weight * scale + (1 - weight);
    return sum / scale;
  });
}

/** Makes a gap of what a logarithmic scale cannot show. */
export function keepPositive(values: Values): (number | null)[] {
  return values.map((value) => (value !== null && value > 0 ? value : null));
}

/**
 * Returns what an axis can show of values, as measured and smoothed. An average that falls towards 0 would stretch a
 * logarithmic axis without end: it is of what that axis can show.
 */
export function prepareValues(
  values: Values,
  weight: number,
  log: boolean,
): { measured: (number | null)[]; shown: (number | null)[] } {
  const measured = log ? keepPositive(values) : [...values];
  return { measured, shown: smooth(measured, weight) };
}

/** Stacks columns upon each other; a step where all are unknown is a gap, a single unknown value adds nothing. */
export function stack(columns: readonly Values[]): (number | null)[][] {
  const length = columns[0]?.length ?? 0;
  const sums: (number | null)[] = Array.from({ length }, (_, row) =>
    columns.every((column) => (column[row] ?? null) === null) ? null : 0,
  );
  return columns.map((column) =>
    sums.map((sum, row) => {
      if (sum === null) return null;
      const next = sum + (column[row] ?? 0);
      sums[row] = next;
      return next;
    }),
  );
}

/** Lists the positions of values that no line reaches, because both neighbours are gaps. */
export function findIsolated(values: Values): number[] {
  const isKnown = (position: number) => (values[position] ?? null) !== null;
  return values.flatMap((_, at) => (isKnown(at) && !isKnown(at - 1) && !isKnown(at + 1) ? [at] : []));
}

export interface Summary {
  known: number;
  first: number;
  last: number;
  low: number;
  high: number;
  lowAt: number;
  highAt: number;
  firstAt: number;
  lastAt: number;
}

/** Sums up a curve for those who do not see it; null without any value. */
export function summarize(x: readonly number[], values: Values): Summary | null {
  let summary: Summary | null = null;
  values.forEach((value, position) => {
    const at = x[position];
    if (value === null || at === undefined || !Number.isFinite(value)) return;
    summary ??= {
      known: 0,
      first: value,
      firstAt: at,
      last: value,
      lastAt: at,
      low: value,
      lowAt: at,
      high: value,
      highAt: at,
    };
    summary.known += 1;
    summary.last = value;
    summary.lastAt = at;
    if (value < summary.low) Object.assign(summary, { low: value, lowAt: at });
    if (value > summary.high) Object.assign(summary, { high: value, highAt: at });
  });
  return summary;
}
