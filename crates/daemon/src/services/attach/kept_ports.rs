//! Direct ports over a restart of the daemon. Another process keeps their queues, and the address set that
//! their programs read, open meanwhile. The next daemon continues with the same devices.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use weft_io::namespace::Namespace;
use weft_io::redirect::MacSet;
use weft_io::tap::Tap;

use crate::holder::PortKeeper;

/// Identifies a network namespace, as long as a device is in it.
type Place = (u64, u64);

/// Descriptors of direct ports kept elsewhere, and those that an earlier run has left.
pub(crate) struct KeptPorts {
    keeper: Arc<dyn PortKeeper>,
    /// Queues by the namespace of their device.
    left: Mutex<BTreeMap<Place, Vec<Tap>>>,
    /// Whether the address set is kept.
    has_set: AtomicBool,
}

impl KeptPorts {
    /// Takes the queues and the set that an earlier run has left. Queues whose programs read another set are
    /// useless.
    pub(crate) fn take(keeper: Arc<dyn PortKeeper>) -> (Self, Option<MacSet>) {
        let (mut set, mut left) = (None, BTreeMap::<Place, Vec<Tap>>::new());
        for fd in keeper.take_ports() {
            if let Some(found) = set_of(&fd) {
                set = Some(found);
            } else if let Ok(queue) = Tap::adopt(fd)
                && let Ok(place) = queue.namespace().and_then(|namespace| namespace.identity())
            {
                left.entry(place).or_default().push(queue);
            }
        }
        if set.is_none() {
            left.clear();
        }
        let has_set = AtomicBool::new(set.is_some());
        (Self { keeper, left: Mutex::new(left), has_set }, set)
    }

    /// The queues of a container's interface left by an earlier run; none on a second call.
    pub(crate) fn queues(&self, namespace: &Path, interface: &str) -> Vec<Tap> {
        let Some(place) = place_of(namespace) else { return Vec::new() };
        let queues = self.left().remove(&place).unwrap_or_default();
        // Namespace numbers are reused: this one is the same only while the device is there.
        let is_here = |queue: &Tap| {
            let at = queue.namespace().and_then(|namespace| namespace.identity());
            queue.name() == interface && at.is_ok_and(|at| at == place)
        };
        queues.into_iter().filter(is_here).collect()
    }

    /// Whether an earlier run has left queues of a container's interface.
    pub(crate) fn has(&self, namespace: &Path) -> bool {
        let left = self.left();
        !left.is_empty() && place_of(namespace).is_some_and(|place| left.contains_key(&place))
    }

    /// Closes the queues that were not claimed.
    pub(crate) fn forget(&self) {
        self.left().clear();
    }

    /// Keeps the queues of a new device, and the set. May block on another process.
    pub(crate) fn keep(&self, queues: &[Tap], set: &MacSet) {
        let mut fds: Vec<OwnedFd> = Vec::new();
        if !self.has_set.swap(true, Ordering::Relaxed) {
            fds.extend(set.as_fd().try_clone_to_owned());
        }
        fds.extend(queues.iter().filter_map(|queue| queue.as_fd().try_clone_to_owned().ok()));
        self.keeper.keep_ports(fds);
    }

    fn left(&self) -> MutexGuard<'_, BTreeMap<Place, Vec<Tap>>> {
        self.left.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn set_of(fd: &OwnedFd) -> Option<MacSet> {
    MacSet::adopt(fd.try_clone().ok()?).ok()
}

fn place_of(namespace: &Path) -> Option<Place> {
    Namespace::open(namespace).and_then(|namespace| namespace.identity()).ok()
}
