//! Resident memory of a process, and whether it grows with the work done.

/// The largest growth allowed in the part that grows least, in KiB.
const PART_GROWTH_MAX_KIB: u64 = 256;
/// The largest growth allowed over all parts, in KiB. Receivers of the vector engine reach the last of their
/// buffers (4 MiB each) once a busy host has left a queue deep. This may happen in any part.
const GROWTH_MAX_KIB: u64 = 12 << 10;

/// Resident memory of a process, in KiB.
///
/// # Errors
/// There is no such process.
pub fn resident_kib(pid: u32) -> anyhow::Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let number = line.and_then(|line| line.split_whitespace().next());
    Ok(number.ok_or_else(|| anyhow::anyhow!("no VmRSS in {status}"))?.parse()?)
}

/// Judges readings of a process's memory in KiB, taken before, between and after several like parts. A leak
/// grows in each part; first use of memory does not.
///
/// # Errors
/// It grew in all parts, or by more than first use explains.
pub fn ensure_flat(looks: &[u64]) -> anyhow::Result<()> {
    let growth = |pair: &[u64]| pair[1].saturating_sub(pair[0]);
    let least = looks.windows(2).map(growth).min();
    let least = least.ok_or_else(|| anyhow::anyhow!("{looks:?} are no two looks at memory"))?;
    let all = looks.iter().max().unwrap_or(&0) - looks[0];
    anyhow::ensure!(least < PART_GROWTH_MAX_KIB, "it grew by {least} KiB and more: {looks:?} KiB");
    anyhow::ensure!(all < GROWTH_MAX_KIB, "it grew by {all} KiB: {looks:?} KiB");
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_step_is_no_growth_and_growth_in_each_part_is() {
        ensure_flat(&[20_000, 20_050, 23_000, 23_900]).unwrap();
        ensure_flat(&[20_000, 19_000]).unwrap();
        ensure_flat(&[20_000, 20_300, 20_600, 20_900]).unwrap_err();
        ensure_flat(&[20_000, 20_000, 33_000]).unwrap_err();
        ensure_flat(&[20_000]).unwrap_err();
    }
}
