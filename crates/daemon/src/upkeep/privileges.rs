//! The daemon's privileges, reduced to those it needs.

use std::io;

use anyhow::Context;
use rustix::thread::{CapabilitySet, CapabilitySets};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};

/// The capabilities that the daemon keeps, as in `packaging/weft.service`. They cover devices, routes and raw
/// packets, and ports below 1024. They also cover the namespaces of containers with notices of their devices,
/// and files of containers and Docker.
const NEEDED: CapabilitySet = CapabilitySet::NET_ADMIN
    .union(CapabilitySet::NET_RAW)
    .union(CapabilitySet::NET_BIND_SERVICE)
    .union(CapabilitySet::NET_BROADCAST)
    .union(CapabilitySet::SYS_ADMIN)
    .union(CapabilitySet::SYS_PTRACE)
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::DAC_READ_SEARCH);

/// System calls that neither the daemon nor its child programs (`nft`, `iptables`) need, and that help a
/// compromised program to escape. They reach other processes' memory, mounts, modules, the kernel itself, its
/// clock and its keys. An allow list would have to fit every version of those programs.
const REFUSED: [i64; 43] = [
    libc::SYS_acct,
    libc::SYS_add_key,
    libc::SYS_adjtimex,
    libc::SYS_chroot,
    libc::SYS_clock_adjtime,
    libc::SYS_clock_settime,
    libc::SYS_delete_module,
    libc::SYS_finit_module,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fsopen,
    libc::SYS_fspick,
    libc::SYS_init_module,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_io_uring_setup,
    libc::SYS_kexec_file_load,
    libc::SYS_kexec_load,
    libc::SYS_keyctl,
    libc::SYS_lookup_dcookie,
    libc::SYS_mount,
    libc::SYS_mount_setattr,
    libc::SYS_move_mount,
    libc::SYS_open_by_handle_at,
    libc::SYS_open_tree,
    libc::SYS_perf_event_open,
    libc::SYS_personality,
    libc::SYS_pivot_root,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_ptrace,
    libc::SYS_quotactl,
    libc::SYS_quotactl_fd,
    libc::SYS_reboot,
    libc::SYS_request_key,
    libc::SYS_setdomainname,
    libc::SYS_sethostname,
    libc::SYS_settimeofday,
    libc::SYS_swapoff,
    libc::SYS_swapon,
    libc::SYS_syslog,
    libc::SYS_umount2,
    libc::SYS_userfaultfd,
];

/// Drops all capabilities but those that the daemon needs.
pub(super) fn drop_capabilities() -> anyhow::Result<()> {
    keep_capabilities(NEEDED).context("the kernel does not drop capabilities")
}

pub(super) fn keep_capabilities(kept: CapabilitySet) -> io::Result<()> {
    rustix::thread::clear_ambient_capability_set()?;
    let held = rustix::thread::capabilities(None)?;
    // Without CAP_SETPCAP, as under systemd, the bounding set is already fixed.
    if held.effective.contains(CapabilitySet::SETPCAP) {
        for capability in CapabilitySet::all().difference(kept).iter() {
            match rustix::thread::remove_capability_from_bounding_set(capability) {
                // This kernel does not know the capability.
                Err(rustix::io::Errno::INVAL) | Ok(()) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
    let sets = CapabilitySets {
        effective: held.effective.intersection(kept),
        permitted: held.permitted.intersection(kept),
        inheritable: CapabilitySet::empty(),
    };
    Ok(rustix::thread::set_capabilities(None, sets)?)
}

/// Denies this process and all its children the system calls they do not need.
pub(super) fn refuse_system_calls() -> anyhow::Result<()> {
    rustix::thread::set_no_new_privs(true)?;
    let program = filter()?;
    seccompiler::apply_filter_all_threads(&program).context("seccomp refused the filter")
}

fn filter() -> anyhow::Result<BpfProgram> {
    let refusal = SeccompAction::Errno(rustix::io::Errno::PERM.raw_os_error().unsigned_abs());
    let rules = REFUSED.into_iter().map(|call| (call, Vec::new())).collect();
    let architecture = std::env::consts::ARCH
        .try_into()
        .context("there is no filter for this processor architecture")?;
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, refusal, architecture)?;
    Ok(filter.try_into()?)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn the_filter_is_one_that_a_kernel_takes() {
        let program = filter().unwrap();
        // The kernel's limit (BPF_MAXINSNS).
        assert!(program.len() > REFUSED.len() && program.len() <= 4_096, "{}", program.len());
    }

    #[test]
    fn the_unit_bounds_the_same_capabilities() {
        let unit = include_str!("../../../../packaging/weft.service");
        let line = unit.lines().find_map(|line| line.strip_prefix("CapabilityBoundingSet="));
        let mut named: Vec<_> = line.unwrap().split_whitespace().collect();
        named.sort_unstable();
        let mut kept: Vec<_> = NEEDED.iter_names().map(|(name, _)| format!("CAP_{name}")).collect();
        kept.sort_unstable();
        assert_eq!(named, kept);
    }
}
