import { useLayoutEffect, useState } from "react";

/** Where an element begins in the page, and its width. */
export function useBox(element: HTMLElement | null): { top: number; width: number } {
  const [found, setFound] = useState({ top: 0, width: 800 });
  useLayoutEffect(() => {
    if (element === null) return undefined;
    const measure = () => {
      const { top, width } = element.getBoundingClientRect();
      const next = { top: Math.round(top + window.scrollY), width: Math.max(100, Math.round(width) - 18) };
      setFound((before) => (before.top === next.top && before.width === next.width ? before : next));
    };
    measure();
    // What stands above it may grow when it has been loaded.
    const observer = new ResizeObserver(measure);
    observer.observe(element);
    for (let above = element.parentElement; above !== null && above !== document.body; above = above.parentElement) {
      observer.observe(above);
    }
    return () => {
      observer.disconnect();
    };
  }, [element]);
  return found;
}
