import { Text } from "@mantine/core";
import type { ReactNode } from "react";

export type Tone = "info" | "warn" | "bad" | "calm";

/** A sentence that a reader should see; the colour repeats what the title says. */
export function Notice({
  tone,
  title,
  testId,
  children,
}: {
  tone: Tone;
  title?: string;
  testId?: string;
  children: ReactNode;
}) {
  const [background, color] = {
    info: ["var(--info-shade)", "var(--info)"],
    warn: ["var(--warn-shade)", "var(--warn)"],
    bad: ["var(--bad-shade)", "var(--bad)"],
    calm: ["var(--shade)", "var(--ink)"],
  }[tone];
  return (
    <div
      className="notice"
      style={{ background, padding: "0.5rem 0.8rem", borderRadius: 6, borderLeft: `3px solid ${color ?? ""}` }}
      data-testid={testId}
      data-tone={tone}
    >
      {title !== undefined && (
        <Text size="sm" fw={650} c={color}>
          {title}
        </Text>
      )}
      <Text size="sm" component="div" style={{ overflowWrap: "anywhere" }}>
        {children}
      </Text>
    </div>
  );
}
