// The settings of a run as a list.

export interface Setting {
  name: string;
  value: string;
  isChanged: boolean;
}

function write(value: unknown): string {
  return typeof value === "string" ? value : JSON.stringify(value);
}

function flatten(tree: Record<string, unknown>, prefix: string): [string, string][] {
  return Object.entries(tree).flatMap(([key, value]): [string, string][] => {
    const name = prefix + key;
    const isGroup = typeof value === "object" && value !== null && !Array.isArray(value);
    if (isGroup && Object.keys(value).length > 0) return flatten(value as Record<string, unknown>, `${name}.`);
    return [[name, write(value)]];
  });
}

/** Lists settings by dotted name, those that differ from the defaults first. */
export function listSettings(tree: Record<string, unknown>, changed: string[]): Setting[] {
  const isChanged = (name: string) => changed.some((one) => name === one || name.startsWith(`${one}.`));
  return flatten(tree, "")
    .map(([name, value]) => ({ name, value, isChanged: isChanged(name) }))
    .toSorted((a, b) => Number(b.isChanged) - Number(a.isChanged) || a.name.localeCompare(b.name));
}

/** Keeps settings whose name or value contains every word. */
export function searchSettings(settings: Setting[], text: string, onlyChanged: boolean): Setting[] {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  return settings.filter(({ name, value, isChanged }) => {
    const found = `${name} ${value}`.toLowerCase();
    return (isChanged || !onlyChanged) && words.every((word) => found.includes(word));
  });
}
