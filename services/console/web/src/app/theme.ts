// The colours are the variables of theme.css; Mantine's own palette is only what those do not name.
import {
  createTheme,
  defaultVariantColorsResolver,
  type CSSVariablesResolver,
  type MantineColorsTuple,
  type VariantColorsResolver,
} from "@mantine/core";

/** Fills Mantine's ten shades of a colour, from light to dark; the last name counts for those that are left. */
function shades(...names: string[]): MantineColorsTuple {
  const tuple = Array.from({ length: 10 }, (_, shade) => `var(--${names[shade] ?? names.at(-1) ?? ""})`);
  return tuple as unknown as MantineColorsTuple;
}

/** Mantine's greys: `gray` is what the light theme takes for surfaces and lines, `dark` what the dark one does. */
const gray = shades("shade", "shade", "line", "line", "line", "quiet", "quiet", "ink");
const dark = shades("ink", "ink", "quiet", "quiet", "line", "shade", "card", "paper");

const variantColorResolver: VariantColorsResolver = (input) => {
  const colors = defaultVariantColorsResolver(input);
  if (input.color === "red" && input.variant === "light") {
    return { ...colors, background: "var(--bad-shade)", hover: "var(--bad-shade)", color: "var(--bad)" };
  }
  const isAccent = input.color === undefined || input.color === "accent";
  if (!isAccent) return colors;
  if (input.variant === "filled") {
    return { ...colors, background: "var(--accent)", hover: "var(--accent)", color: "var(--paper)" };
  }
  if (input.variant === "light") {
    return { ...colors, background: "var(--good-shade)", hover: "var(--shade)", color: "var(--accent)" };
  }
  return colors;
};

export const theme = createTheme({
  primaryColor: "accent",
  colors: { accent: shades("accent"), red: shades("bad"), gray, dark },
  variantColorResolver,
  defaultRadius: "sm",
  fontFamily: "var(--font)",
  fontFamilyMonospace: "var(--mono)",
  headings: { fontWeight: "650" },
  cursorType: "pointer",
  components: {
    SegmentedControl: { defaultProps: { color: "accent" } },
    Badge: { defaultProps: { tt: "none", fw: 600 } },
  },
});

const variables = {
  "--mantine-color-bright": "var(--ink)",
  "--mantine-color-body": "var(--paper)",
  "--mantine-color-text": "var(--ink)",
  "--mantine-color-dimmed": "var(--quiet)",
  "--mantine-color-placeholder": "var(--quiet)",
  "--mantine-color-anchor": "var(--accent)",
  "--mantine-color-error": "var(--bad)",
  "--mantine-color-default": "var(--card)",
  "--mantine-color-default-hover": "var(--shade)",
  "--mantine-color-default-color": "var(--ink)",
  "--mantine-color-default-border": "var(--line)",
  // What is chosen in a list: its text is the accent.
  "--mantine-color-accent-light": "var(--good-shade)",
  "--mantine-color-accent-light-hover": "var(--good-shade)",
  "--mantine-color-accent-light-color": "var(--accent)",
  "--mantine-color-accent-text": "var(--accent)",
};

export const resolveVariables: CSSVariablesResolver = () => ({
  variables: {},
  light: variables,
  // Text on the accent, which is light there.
  dark: { ...variables, "--mantine-color-white": "var(--paper)" },
});
