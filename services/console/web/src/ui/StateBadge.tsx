import { Badge } from "@mantine/core";

const GOOD = new Set(["finished", "done", "ready", "completed", "ok", "running", "serving"]);
const BAD = new Set(["failed", "dead", "unreachable", "error", "broken", "crashed", "aborted"]);

/** A state by name; the colour repeats what the word says. */
export function StateBadge({ state, title }: { state: string; title?: string }) {
  const tone = GOOD.has(state) ? "good" : BAD.has(state) ? "bad" : "neutral";
  const colors = {
    good: { background: "var(--good-shade)", color: "var(--good)" },
    bad: { background: "var(--bad-shade)", color: "var(--bad)" },
    neutral: { background: "var(--shade)", color: "var(--ink)" },
  }[tone];
  return (
    <Badge
      variant="default"
      style={{ ...colors, border: 0, flexShrink: 0, minWidth: "max-content" }}
      title={title}
      data-state={state}
    >
      {state}
    </Badge>
  );
}
