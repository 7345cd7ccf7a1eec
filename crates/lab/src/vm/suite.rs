//! Tests in guests: their kernels, how they are found and built, and their results.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::bail;
use weft_bench::sandbox::progress::{note, print, step};

use super::kernel::{Choice, Kernel};
use super::report::Report;
use super::shell::quoted;
use super::{Clock, Guest, Job, interrupt, make_directory, newer};
use crate::programs::{Places, Program, names, programs};
use crate::ring::{Ring, each_fits, fits, is_one_of};

/// The tests of a guest: those of the namespace lab, and those that need a guest's kernel.
const PLACES: Places<'static> =
    Places { packages: &["weft-kernel", "weft-lab"], prefixes: &["net_", "vm_"] };
/// A guest's memory in MiB.
const MEMORY_MIB: u32 = 3072;
/// Memory of this machine that a guest takes beside the guest's, in MiB.
const OVERHEAD_MIB: u64 = 512;
/// The intended length of a guest, in seconds of [`DURATIONS`]. It is short enough that guests side by side end
/// together, and that a guest that dies loses few tests. It is long enough that booting is the smaller part.
const GUEST_SECONDS: u32 = 200;
/// The longest that one test program may take in a guest, in seconds.
const PROGRAM_LIMIT_S: u64 = 1_500;
/// The longest that a guest may take, in seconds.
const GUEST_LIMIT_S: u64 = 2_400;
/// How many times longer than real hardware an emulated machine takes: the factor for the limits of
/// `weft_lab::net`.
const SLOWNESS: u32 = 8;

const BOTH: &[Choice] = &[Choice::Newest, Choice::Debian12];
const NEWEST: &[Choice] = &[Choice::Newest];
const DEBIAN12: &[Choice] = &[Choice::Debian12];

/// The kernels of each test: of all rows that fit a test, named `target::test`, the last one counts. `*` stands
/// for any text.
const TABLE: [Row; 27] = [
    Row {
        tests: "vm_*",
        kernels: NEWEST,
        why: "what needs the kernel engine, on the kernel that can the most",
    },
    Row {
        tests: "vm_xfrm::*",
        kernels: BOTH,
        why: "what Weft asks of the kernel differs between kernels",
    },
    Row {
        tests: "vm_matrix::kernel_to_kernel",
        kernels: BOTH,
        why: "the whole product on the kernel engine of Debian 12",
    },
    Row {
        tests: "vm_steering::*",
        kernels: BOTH,
        why: "an older kernel's verifier takes fewer programs",
    },
    Row {
        tests: "vm_bad_input::a_kernel_without_aes_gcm*",
        kernels: DEBIAN12,
        why: "newer kernels have AES-GCM built in, so that nothing can take it away",
    },
    Row {
        tests: "vm_figures::*within*",
        kernels: &[],
        why: "speed is measured, by name, and asserted in no suite",
    },
    Row { tests: "net_*", kernels: NEWEST, why: "the namespace lab on another kernel" },
    Row {
        tests: "net_bench::*",
        kernels: &[],
        why: "an emulated machine rounds figures to nothing; vm_demo measures the kernel engine's rows",
    },
    Row {
        tests: "net_idle::*",
        kernels: &[],
        why: "judges ticks and memory of real hardware: the namespace lab alone can",
    },
    Row {
        tests: "net_mixed::*",
        kernels: &[],
        why: "more at once than an emulated machine moves without queues that overflow",
    },
    Row { tests: "net_systemd::*", kernels: &[], why: "a guest has no systemd" },
    Row {
        tests: "net_names::*",
        kernels: &[],
        why: "a guest has neither dig nor compilers, and DNS is alike on every kernel",
    },
    Row {
        tests: "net_networks::names_are_known*",
        kernels: &[],
        why: "a guest has no dig, and DNS is alike on every kernel",
    },
    Row {
        tests: "net_gateway*",
        kernels: &[],
        why: "a guest has no dig; vm_gateway has the kernel's device",
    },
    Row {
        tests: "net_gateway_hosts::*",
        kernels: &[],
        why: "what gateways tell each other is alike on every kernel",
    },
    Row {
        tests: "net_compose::*",
        kernels: &[],
        why: "a guest has no engine of Docker's, which is alike on every kernel",
    },
    Row {
        tests: "net_docker*",
        kernels: &[],
        why: "a guest has no engine of Docker's, which is alike on every kernel",
    },
    Row {
        tests: "net_cni::*",
        kernels: &[],
        why: "a guest has no containerd, which is alike on every kernel",
    },
    Row {
        tests: "net_cni_chain::*",
        kernels: &[],
        why: "a guest has neither containerd nor CNI's own plugins, which are alike on every kernel",
    },
    Row {
        tests: "net_cni_many::*",
        kernels: &[],
        why: "an emulated machine starts too few processes in the time limits of a runtime",
    },
    Row {
        tests: "net_weave_guide::*",
        kernels: &[],
        why: "the commands of a guide are alike on every kernel",
    },
    Row {
        tests: "net_cni_pods::*",
        kernels: &[],
        why: "a guest has no containerd, which is alike on every kernel",
    },
    Row {
        tests: "net_cni_tools::*",
        kernels: &[],
        why: "a guest has none of CNI's own programs, which are alike on every kernel",
    },
    Row {
        tests: "net_podman::*",
        kernels: &[],
        why: "a guest has no podman, which is alike on every kernel",
    },
    Row {
        tests: "net_port_lock::the_lock_outlives*",
        kernels: BOTH,
        why: "kernels differ in what their rules see of a frame",
    },
    Row { tests: "net_firewall::*", kernels: &[], why: "rules are read alike on every kernel" },
    Row {
        tests: "net_pressure::*",
        kernels: &[],
        why: "an emulated machine is overloaded by itself, and takes minutes to fill a queue",
    },
];

/// The ring before every push. For each kind of path, switch and device it covers carried traffic, traffic that
/// must never leave or enter, and recovery. The kernel's interfaces are tested on every kernel.
const CORE: [&str; 30] = [
    "vm_bad_input::esp_loaded_later*",
    "vm_bad_input::without_nft*",
    "vm_channel::a_kernel_and_a_vector_engine*",
    "vm_dco::*either_devices_packets*",
    "vm_dco::*keys_are_swapped_under_traffic_without*",
    "vm_engine_channel::frames_and_probes*",
    "vm_engine_channel::rekeys*",
    "vm_gateway::stock_clients*",
    "vm_hosts::a_member_sends*",
    "vm_hosts::after_kill_9*",
    "vm_hosts::one_broadcast*on_different_switches",
    "vm_matrix::kernel_to*",
    "vm_networks::a_kernel_on_a_bridge*",
    "vm_odp::*a_stranger*",
    "vm_odp::*containers_reach_each_other*",
    "vm_odp::*nobody_draws*",
    "vm_ovpn::*a_float*",
    "vm_ovpn::*every_cipher*",
    "vm_ovpn::*keys_are_swapped*",
    "vm_ovpn::*two_peers*",
    "vm_paths::behind_a_nat*",
    "vm_paths::blocked_protocol_50*",
    "vm_paths::with_both_blocked*",
    "vm_steering::*",
    "vm_wire::foreign_packets_are_not_sealed_on_the_bridge",
    "vm_wire::plaintext_injected*on_odp",
    "vm_wire::stop_leaves*",
    "vm_wire::the_guard_holds*",
    "vm_wire::tshark*udp",
    "vm_xfrm::*",
];

/// Tests of the table that wait for a soak, so that the suite ends within 20 minutes. Others show the same or more
/// on the guest's own kernel, or almost the same.
const SOAK_ONLY: [&str; 17] = [
    "net_dco::*symmetric_ids_over_tcp*",
    "net_devices::*",
    "net_ecn::*",
    "net_kept::*",
    "net_moves::*",
    "net_port_lock::a_spoofing*",
    "net_ports::*",
    "net_rekey::*",
    "net_restart::*",
    "net_shortcuts::where*",
    "net_top::*",
    "net_traffic::*",
    "net_wire::*",
    "net_workers::*",
    "vm_demo::the_benchmark*",
    "vm_demo::without_esp*",
    "vm_figures::*gigabytes*",
];

/// Tests of lanes, of which the kernel has one for each core, alone and in the whole product. Their guests have
/// two cores, and so the machine's clock, which a busy machine holds up: nothing here may go by it.
const TWO_CORES: [&str; 3] =
    ["vm_hosts::a_host_with_the_kernel_and_one_without*", "vm_wire::tshark*", "vm_xfrm::lanes::*"];

/// Tests whose guests' kernels boot with further words.
const BOOTED_WITH: [(&str, &str); 1] = [("vm_ipv4::*", "ipv6.disable=1")];

/// Tests with OpenVPN 2.7 as the client, which their guest gets ([`newer`]).
const NEWER: &str = "vm_gateway::openvpn_2_7*";

/// The approximate length of a test on a core of this machine, in seconds; the last line that fits counts.
/// Nothing is judged by it; the longest guests begin first.
const DURATIONS: [(&str, u32); 17] = [
    ("*", 6),
    ("net_*", 12),
    ("net_dco::*", 6),
    ("vm_*", 15),
    ("vm_dco::*", 5),
    ("vm_demo::*", 150),
    ("vm_engine_channel::*", 4),
    ("vm_figures::*gigabytes*", 60),
    ("vm_gateway::*", 25),
    ("vm_matrix::*", 20),
    ("vm_matrix::two_rows*", 1),
    ("vm_odp::*", 4),
    ("vm_ovpn::*", 4),
    ("vm_random::*", 50),
    ("vm_top::*", 12),
    ("vm_wire::*", 22),
    ("vm_xfrm::*", 2),
];

/// A row of the table.
struct Row {
    tests: &'static str,
    kernels: &'static [Choice],
    why: &'static str,
}

/// About how long the tests of a program take, in seconds.
fn seconds_of(program: &Program) -> u32 {
    let of = |test: &String| seconds(&format!("{}::{test}", program.target));
    program.tests.iter().map(of).sum()
}

/// The tests to run.
#[derive(Debug, Clone, Default)]
pub struct Request {
    /// Only tests with this in their name, `target::test`; the table is not asked then.
    pub name: Option<String>,
    /// Only this kernel.
    pub kernel: Option<Choice>,
    /// How much runs where no name is given.
    pub ring: Ring,
    /// How many guests at once; by default as many as cores and memory allow.
    pub guests: Option<usize>,
    /// The `weft` program for the guests.
    pub weft: Option<PathBuf>,
    /// Environment variables for the tests.
    pub environment: Vec<(String, String)>,
    /// The directory of the guests' logs and files.
    pub logs: PathBuf,
}

/// The work of one guest.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Share {
    kernel: Choice,
    number: usize,
    clock: Clock,
    boot: &'static str,
    programs: Vec<Program>,
}

/// Builds the tests, runs them in guests, prints their output as each program ends, and tells whether
/// all passed.
///
/// # Errors
/// Nothing fits the request, a build failed, or there is no kernel. A guest that fails is not an error:
/// its tests count as failed.
pub fn run_tests(request: &Request) -> anyhow::Result<bool> {
    let programs = programs(&PLACES, request.name.as_deref())?;
    if request.name.is_none() {
        each_fits(&CORE, &names(&programs), "the core of the VM lab")?;
        no_row_is_idle(&programs)?;
    }
    let by_kernel = planned(&programs, request)?;
    let guests = request.guests.unwrap_or_else(guests_at_once);
    let mut shares = shared_out(by_kernel);
    if request.ring == Ring::Soak {
        // A soak looks for faults that only cores side by side show.
        shares.iter_mut().for_each(|share| share.clock = Clock::Host);
    }
    let mut kernels = BTreeMap::new();
    for share in &shares {
        if let Entry::Vacant(place) = kernels.entry(share.kernel) {
            place.insert(Kernel::get(share.kernel, false)?);
        }
    }
    let passed = AtomicBool::new(true);
    let waiting = Mutex::new(shares.into_iter());
    std::thread::scope(|scope| {
        for _ in 0..guests {
            scope.spawn(|| {
                while let Some(share) = next(&waiting)
                    && let Some(kernel) = kernels.get(&share.kernel)
                {
                    let good = run_share(&share, kernel, request);
                    passed.fetch_and(good, Ordering::Relaxed);
                }
            });
        }
    });
    interrupt::check()?;
    Ok(passed.into_inner())
}

fn next(waiting: &Mutex<std::vec::IntoIter<Share>>) -> Option<Share> {
    if interrupt::check().is_err() {
        return None;
    }
    waiting.lock().ok()?.next()
}

/// Runs one guest to its end. Each of its tests is counted, even if the guest dies.
fn run_share(share: &Share, kernel: &Kernel, request: &Request) -> bool {
    let label = format!("{}-{}", share.kernel, share.number);
    let tests: usize = share.programs.iter().map(|program| program.tests.len()).sum();
    step(&format!("guest {label}: {tests} tests on {}", kernel.release));
    let expected = share.programs.iter();
    let expected =
        expected.map(|program| (program.target.clone(), program.tests.clone())).collect();
    let mut report = Report::new(expected);
    let place = request.logs.join(&label);
    let ending = prepared(share, request, &place).and_then(|job| {
        let mut log = std::fs::File::create(place.join("output.log"))?;
        Guest::new(kernel, &job)?.run(&mut |bytes| {
            use std::io::Write;
            let _ = log.write_all(bytes);
            for block in report.feed(bytes) {
                print(&format!("\n[{label}] {block}"));
            }
        })
    });
    match &ending {
        Ok(ending) => note(&format!(
            "guest {label} took {:.0} s ({:.0} s of processor time)",
            ending.elapsed.as_secs_f64(),
            ending.processor.as_secs_f64()
        )),
        Err(error) => note(&format!("guest {label}: {error:#}")),
    }
    if interrupt::check().is_err() {
        return false;
    }
    if let Some(block) = report.finish() {
        print(&format!("\n[{label}] {block}"));
    }
    note(&format!("logs: {}", place.display()));
    ending.is_ok() && report.all_passed()
}

fn prepared(share: &Share, request: &Request, place: &Path) -> anyhow::Result<Job> {
    let _ = std::fs::remove_dir_all(place);
    make_directory(place)?;
    let inside = |program: &Program| Path::new("/tests").join(&program.target);
    let files = share.programs.iter().map(|program| (program.file.clone(), inside(program)));
    let mut files: Vec<(PathBuf, PathBuf)> = files.collect();
    if share.programs.iter().any(|program| program.needs_newer()) {
        files.push((newer::openvpn()?, PathBuf::from(newer::INSIDE)));
    }
    let mut environment = request.environment.clone();
    environment.push(("WEFT_LAB_SLOWNESS".to_owned(), SLOWNESS.to_string()));
    Ok(Job {
        script: script(&share.programs),
        files,
        weft: request.weft.clone(),
        environment,
        memory_mib: MEMORY_MIB,
        clock: share.clock,
        boot: share.boot.to_owned(),
        limit: Duration::from_secs(GUEST_LIMIT_S),
        out: Some(place.join("out")),
        log: Some(place.join("kernel.log")),
    })
}

/// The script that runs the programs one after the other, with a mark before and after each. Their standard
/// error, such as reports of long waits, goes to the kernel's log.
fn script(programs: &[Program]) -> String {
    let mut text = String::new();
    for Program { target, tests, .. } in programs {
        let names: Vec<String> = tests.iter().map(|name| quoted(name)).collect();
        text.push_str(&format!(
            "{begin}\ntimeout -k 5 {PROGRAM_LIMIT_S} /tests/{target} --test-threads 1 --exact {names} 2>/dev/console\n\
             {end} $? $SECONDS\n",
            begin = super::report::begin_command(target),
            end = super::report::end_command(target),
            names = names.join(" "),
        ));
    }
    text
}

/// As many guests as cores and free memory allow, at least one. A guest whose clock counts instructions never
/// waits, and QEMU emulates all its cores on one thread.
fn guests_at_once() -> usize {
    let memory = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    guests_for(cores(), available_mib(&memory))
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

fn guests_for(cores: usize, available_mib: u64) -> usize {
    let by_memory = available_mib / (u64::from(MEMORY_MIB) + OVERHEAD_MIB);
    cores.min(usize::try_from(by_memory).unwrap_or(usize::MAX)).max(1)
}

fn available_mib(meminfo: &str) -> u64 {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib =
        line.and_then(|line| line.split_whitespace().next()).and_then(|word| word.parse().ok());
    kib.unwrap_or(0_u64) / 1024
}

/// The tests that run on each kernel.
fn planned(programs: &[Program], request: &Request) -> anyhow::Result<Vec<(Choice, Vec<Program>)>> {
    let mut plan = Vec::new();
    for choice in Choice::ALL {
        let wanted = |name: &str| match &request.name {
            Some(part) => {
                request.kernel.unwrap_or(Choice::Newest) == choice && name.contains(part.as_str())
            }
            None => {
                is_in(request.ring, name)
                    && request.kernel.is_none_or(|kernel| kernel == choice)
                    && row(name).is_some_and(|row| row.kernels.contains(&choice))
            }
        };
        let of_kernel = programs.iter().map(|program| {
            let tests = program.tests.iter();
            let tests = tests.filter(|test| wanted(&format!("{}::{test}", program.target)));
            Program { tests: tests.cloned().collect(), ..program.clone() }
        });
        let of_kernel: Vec<Program> =
            of_kernel.filter(|program| !program.tests.is_empty()).collect();
        if !of_kernel.is_empty() {
            plan.push((choice, of_kernel));
        }
    }
    match &request.name {
        Some(name) if plan.is_empty() => bail!("no test of a guest has '{name}' in its name"),
        None if plan.is_empty() => bail!("no test runs on this kernel"),
        _ => Ok(plan),
    }
}

/// Whether a ring holds a test.
fn is_in(ring: Ring, name: &str) -> bool {
    match ring {
        Ring::Core => is_one_of(&CORE, name),
        Ring::Full => !is_one_of(&SOAK_ONLY, name),
        Ring::Soak => true,
    }
}

impl Program {
    /// Whether one of its tests is of a program that only a newer Debian has.
    fn needs_newer(&self) -> bool {
        let name = |test: &String| format!("{}::{test}", self.target);
        self.tests.iter().any(|test| fits(NEWER, &name(test)))
    }
}

/// The row that counts for a test.
fn row(name: &str) -> Option<&'static Row> {
    TABLE.iter().rev().find(|row| fits(row.tests, name))
}

/// About how long a test takes.
fn seconds(name: &str) -> u32 {
    DURATIONS.iter().rev().find(|(pattern, _)| fits(pattern, name)).map_or(0, |(_, it)| *it)
}

/// A row that no test needs names a test that is gone.
fn no_row_is_idle(programs: &[Program]) -> anyhow::Result<()> {
    let names = names(programs);
    for row in &TABLE {
        if !names.iter().any(|name| fits(row.tests, name)) {
            bail!("no test fits the row {} ({}) of the table of the VM suite", row.tests, row.why);
        }
    }
    let of = "the VM suite";
    each_fits(&SOAK_ONLY, &names, of)?;
    each_fits(&TWO_CORES, &names, of)?;
    each_fits(&[NEWER], &names, of)?;
    each_fits(&BOOTED_WITH.map(|(pattern, _)| pattern), &names, of)?;
    Ok(())
}

/// The work of each guest, the longest first. A guest gets all tests of a kernel that need two cores, or all
/// that boot it with the same words. Other guests get a share of the remaining programs, spread evenly.
fn shared_out(plan: Vec<(Choice, Vec<Program>)>) -> Vec<Share> {
    let mut shares = Vec::new();
    for (kernel, programs) in plan {
        let (on_two_cores, mut programs) = apart(&programs, |name| is_one_of(&TWO_CORES, name));
        let mut apart_from_all = vec![(Clock::Host, "", on_two_cores)];
        for (pattern, words) in BOOTED_WITH {
            let booted;
            (booted, programs) = apart(&programs, |name| fits(pattern, name));
            apart_from_all.push((Clock::Instructions, words, booted));
        }
        let parts = length(&programs).div_ceil(GUEST_SECONDS) as usize;
        programs.sort_by_key(|program| std::cmp::Reverse(seconds_of(program)));
        let mut bins: Vec<Vec<Program>> = vec![Vec::new(); parts];
        for program in programs {
            if let Some(bin) = bins.iter_mut().min_by_key(|bin| length(bin)) {
                bin.push(program);
            }
        }
        let bins = bins.into_iter().map(|programs| (Clock::Instructions, "", programs));
        let all = bins.chain(apart_from_all);
        let numbered = all.filter(|(_, _, programs)| !programs.is_empty()).enumerate();
        shares.extend(numbered.map(|(index, (clock, boot, programs))| Share {
            kernel,
            number: index + 1,
            clock,
            boot,
            programs,
        }));
    }
    shares.sort_by_key(|share| std::cmp::Reverse(length(&share.programs)));
    shares
}

/// About how long programs take one after the other, in seconds.
fn length(programs: &[Program]) -> u32 {
    programs.iter().map(seconds_of).sum()
}

/// The programs with their chosen tests, and the programs with the others.
fn apart(programs: &[Program], chosen: impl Fn(&str) -> bool) -> (Vec<Program>, Vec<Program>) {
    let part = |wanted: bool| {
        let parts = programs.iter().map(|program| {
            let is_chosen = |test: &str| chosen(&format!("{}::{test}", program.target));
            let tests = program.tests.iter().filter(|test| is_chosen(test) == wanted);
            Program { tests: tests.cloned().collect(), ..program.clone() }
        });
        parts.filter(|program| !program.tests.is_empty()).collect()
    };
    (part(true), part(false))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn program(target: &str, tests: &[&str]) -> Program {
        let tests = tests.iter().map(|&name| name.to_owned()).collect();
        Program { target: target.to_owned(), file: PathBuf::new(), tests }
    }

    #[test]
    fn the_last_row_that_fits_counts() {
        let all = [
            program("net_admission", &["x"]),
            program("net_bench", &["x"]),
            program("net_docker", &["x"]),
            program("net_errors", &["x"]),
            program(
                "net_port_lock",
                &["an_address_behind_x", "a_spoofing_x", "the_lock_outlives_x"],
            ),
            program("net_shortcuts", &["where_x", "x"]),
            program("net_wire", &["x"]),
            program("vm_bad_input", &["a_kernel_without_aes_gcm_goes_on", "names_and_ports"]),
            program("vm_gateway", &["openvpn_2_7_x"]),
            program("vm_hosts", &["a_host_with_the_kernel_and_one_without", "one_broadcast"]),
            program("vm_matrix", &["kernel_to_kernel"]),
            program("vm_steering", &["x"]),
            program("vm_xfrm", &["x", "lanes::x"]),
        ];
        let plan = planned(&all, &Request::default()).unwrap();
        let of = |index: usize| -> Vec<&str> {
            let programs: &Vec<Program> = &plan[index].1;
            programs.iter().map(|program| program.target.as_str()).collect()
        };
        let net = ["net_admission", "net_errors", "net_port_lock", "net_shortcuts"];
        let guests =
            ["vm_bad_input", "vm_gateway", "vm_hosts", "vm_matrix", "vm_steering", "vm_xfrm"];
        assert_eq!(of(0), [&net[..], &guests[..]].concat());
        assert_eq!(of(1), ["net_port_lock", "vm_bad_input", "vm_matrix", "vm_steering", "vm_xfrm"]);
        assert_eq!((plan[0].0, plan[1].0), (Choice::Newest, Choice::Debian12));

        let soak = planned(&all, &Request { ring: Ring::Soak, ..Request::default() }).unwrap();
        let tests = |plan: &[(Choice, Vec<Program>)]| -> usize {
            plan[0].1.iter().map(|program| program.tests.len()).sum()
        };
        // That of net_wire, a_spoofing_x and where_x.
        assert_eq!(tests(&soak) - tests(&plan), 3);
    }

    #[test]
    fn the_core_is_a_part_of_the_whole() {
        for ring in [Ring::Core, Ring::Full, Ring::Soak] {
            assert!(is_in(ring, "vm_xfrm::carry::x"), "{ring:?}");
        }
        assert!(!is_in(Ring::Core, "vm_random::x") && is_in(Ring::Full, "vm_random::x"));
        assert!(!is_in(Ring::Full, "net_wire::x") && is_in(Ring::Soak, "net_wire::x"));
        for pattern in CORE {
            assert!(!is_one_of(&SOAK_ONLY, pattern), "{pattern} waits for a soak");
        }
    }

    #[test]
    fn a_name_asks_for_one_kernel_and_not_for_the_table() {
        let both = [program("net_idle", &["x", "xy"]), program("vm_esp", &["xyz"])];
        let name = Some("net_idle::xy".to_owned());
        let plan = planned(&both, &Request { name, ..Request::default() }).unwrap();
        assert_eq!(plan, [(Choice::Newest, vec![program("net_idle", &["xy"])])]);
        let name = Some("nothing".to_owned());
        assert!(planned(&both, &Request { name, ..Request::default() }).is_err());
    }

    #[test]
    fn a_row_without_a_test_is_an_error() {
        let error = no_row_is_idle(&[program("vm_xfrm", &["z"])]).unwrap_err();
        assert!(error.to_string().contains("vm_matrix"), "{error}");
    }

    #[test]
    fn guests_get_even_shares_and_every_program_once() {
        let many: Vec<Program> =
            (1..8).map(|n| program(&format!("vm_{n}"), &vec!["t"; n])).collect();
        let plan = vec![(Choice::Debian12, vec![many[0].clone()]), (Choice::Newest, many.clone())];
        let shares = shared_out(plan);
        let seconds: Vec<u32> = shares.iter().map(|share| length(&share.programs)).collect();
        assert_eq!(seconds, [150, 135, 135, 15], "even, and the longest first");
        assert_eq!((shares[3].kernel, shares[3].number), (Choice::Debian12, 1));
        let mut targets: Vec<&str> = shares[..3]
            .iter()
            .flat_map(|share| share.programs.iter().map(|program| program.target.as_str()))
            .collect();
        targets.sort_unstable();
        assert_eq!(targets, ["vm_1", "vm_2", "vm_3", "vm_4", "vm_5", "vm_6", "vm_7"]);
    }

    #[test]
    fn tests_that_need_two_cores_share_a_guest_that_has_them() {
        let tests = ["lanes::a", "carry::b", "lanes::c"];
        let shares = shared_out(vec![(Choice::Newest, vec![program("vm_xfrm", &tests)])]);
        let seen: Vec<(Clock, &Vec<Program>)> =
            shares.iter().map(|share| (share.clock, &share.programs)).collect();
        let [others, lanes] = [&["carry::b"][..], &["lanes::a", "lanes::c"]]
            .map(|tests| vec![program("vm_xfrm", tests)]);
        assert_eq!(seen, [(Clock::Host, &lanes), (Clock::Instructions, &others)]);
    }

    #[test]
    fn tests_with_boot_words_have_a_separate_guest() {
        let programs = vec![program("vm_ipv4", &["a", "b"]), program("vm_xfrm", &["c"])];
        let shares = shared_out(vec![(Choice::Newest, programs)]);
        let seen: Vec<(&str, &str)> = shares
            .iter()
            .flat_map(|share| share.programs.iter().map(|it| (share.boot, it.target.as_str())))
            .collect();
        assert_eq!(seen, [("ipv6.disable=1", "vm_ipv4"), ("", "vm_xfrm")]);
    }

    #[test]
    fn guests_at_once_are_bounded_by_cores_and_memory() {
        assert_eq!(guests_for(1, 64_000), 1);
        assert_eq!(guests_for(2, 64_000), 2);
        assert_eq!(guests_for(8, 64_000), 8);
        assert_eq!(guests_for(8, 8_000), 2);
        assert_eq!(guests_for(8, 100), 1);
        assert_eq!(available_mib("MemTotal: 9 kB\nMemAvailable:   2097152 kB\n"), 2048);
    }
}
