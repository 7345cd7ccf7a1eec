//! The hosts to dial, as the user named them.

use std::sync::{Mutex, PoisonError};

use weft_link::Target;

/// Targets of the last start and of `weft connect`.
pub(crate) const TARGETS_FILE: &str = "targets.json";

/// The hosts that the user named, at launch and by `weft connect`.
#[derive(Default)]
pub(crate) struct Targets {
    list: Mutex<Vec<Target>>,
    /// Held during a change, which waits for the disk. The control loop reads `list` alone.
    changing: Mutex<()>,
}

impl Targets {
    pub(crate) fn new(targets: Vec<Target>) -> Self {
        Self { list: Mutex::new(targets), changing: Mutex::default() }
    }

    pub(crate) fn list(&self) -> Vec<Target> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Replaces the list by what `change` makes of it, or leaves it as it was.
    pub(crate) fn change<T, E>(
        &self,
        change: impl FnOnce(&[Target]) -> Result<(Vec<Target>, T), E>,
    ) -> Result<T, E> {
        let _changing = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let (after, result) = change(&self.list())?;
        *self.list.lock().unwrap_or_else(PoisonError::into_inner) = after;
        Ok(result)
    }
}
