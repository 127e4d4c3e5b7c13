import { useEffect, useState } from "react";

/** The time in seconds since 1970, each second anew while the page is visible. */
export function useSeconds(): number {
  const [now, setNow] = useState(() => Date.now() / 1000);
  useEffect(() => {
    const timer = setInterval(() => {
      if (document.visibilityState === "visible") setNow(Date.now() / 1000);
    }, 1000);
    return () => {
      clearInterval(timer);
    };
  }, []);
  return now;
}
