import { ActionIcon, useComputedColorScheme, useMantineColorScheme } from "@mantine/core";
import { useHotkeys } from "../ui/hotkeys";

/** Switches between light and dark; until it is used, the system's choice counts. */
export function ThemeToggle() {
  const { setColorScheme } = useMantineColorScheme();
  const shown = useComputedColorScheme("light", { getInitialValueInEffect: false });
  const other = shown === "dark" ? "light" : "dark";
  const toggle = () => {
    setColorScheme(other);
  };
  useHotkeys([{ keys: "T", label: `Switch to the ${other} colours`, run: toggle }]);
  return (
    <ActionIcon
      variant="default"
      size="lg"
      onClick={toggle}
      aria-label={`Switch to the ${other} colours`}
      data-testid="theme-toggle"
    >
      <svg width="16" height="16" viewBox="0 0 16 16" aria-hidden="true">
        <circle cx="8" cy="8" r="6" fill="none" stroke="currentColor" strokeWidth="1.5" />
        <path d="M8 2 A6 6 0 0 1 8 14 Z" fill="currentColor" />
      </svg>
    </ActionIcon>
  );
}
