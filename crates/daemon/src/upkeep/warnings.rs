//! Problems on this host while the daemon runs. `weft status` and `weft doctor` show them, and the log
//! reports each once as it comes and goes.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

/// The warnings by their source.
#[derive(Clone, Default)]
pub(crate) struct Warnings(Arc<Mutex<BTreeMap<&'static str, Vec<String>>>>);

impl Warnings {
    /// Replaces all current warnings of one source.
    pub(crate) fn set(&self, from: &'static str, mut now: Vec<String>) {
        now.truncate(WARNINGS_MAX);
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let before = all.insert(from, now.clone()).unwrap_or_default();
        for warning in now.iter().filter(|warning| !before.contains(warning)) {
            tracing::warn!(warning);
        }
        for warning in before.iter().filter(|warning| !now.contains(warning)) {
            tracing::info!(warning, "resolved");
        }
    }

    /// All of them.
    pub(crate) fn list(&self) -> Vec<String> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.values().flatten().cloned().collect()
    }
}

/// Warnings of one source that are shown.
const WARNINGS_MAX: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_source_replaces_its_own_warnings_alone() {
        let warnings = Warnings::default();
        warnings.set("routes", vec!["a route".into()]);
        warnings.set("disk", vec!["full".into(), "slow".into()]);
        assert_eq!(warnings.list(), ["full", "slow", "a route"]);
        warnings.set("disk", Vec::new());
        assert_eq!(warnings.list(), ["a route"]);
        warnings.set("routes", (0..100).map(|n| n.to_string()).collect());
        assert_eq!(warnings.list().len(), WARNINGS_MAX);
    }
}
