//! Pinning threads to CPUs.

use std::io;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// The CPUs that the calling thread may run on, in ascending order.
///
/// # Errors
/// The error of `sched_getaffinity`.
pub fn allowed() -> io::Result<Vec<usize>> {
    let set = sched_getaffinity(None)?;
    Ok((0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect())
}

/// Lets the calling thread run on `cpu` alone.
///
/// # Errors
/// The error of `sched_setaffinity`: no such CPU, or it is not among those that are [`allowed`].
pub fn pin_to(cpu: usize) -> io::Result<()> {
    if cpu >= CpuSet::MAX_CPU {
        return Err(io::Error::from(io::ErrorKind::InvalidInput));
    }
    let mut set = CpuSet::new();
    set.set(cpu);
    Ok(sched_setaffinity(None, &set)?)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_pinned_thread_has_one_cpu() {
        std::thread::spawn(|| {
            let last = *allowed().unwrap().last().unwrap();
            pin_to(last).unwrap();
            assert_eq!(allowed().unwrap(), [last]);
            assert!(pin_to(CpuSet::MAX_CPU).is_err());
        })
        .join()
        .unwrap();
    }
}
